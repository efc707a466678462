"""The place of each flag of MindSpeed, the monolithic library.

``mindspeed.json`` holds facts: which option strings its release branches define. Where a flag is found
here follows from the declarations of this repository and from the announced packages; only what has another
name or no successor is written down below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tables import code, table

from mindspeed_core.flags.announced import flag_owners
from mindspeed_core.flags.core import CORE_OWNER
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.hosts.standalone.arguments import megatron_lm_answers
from mindspeed_core.registry import Registry

FACTS = Path(__file__).with_name("mindspeed.json")
HERE, RENAMED, ANNOUNCED, GONE = "here", "another name", "announced", "no successor"
MEANINGS = {
    HERE: "Type them as before.",
    RENAMED: "The same thing is there, and is asked for differently.",
    ANNOUNCED: "Planned for the package named; until it is there, the plan names it and stops.",
    GONE: "What to do instead, or why there is nothing to do.",
}


@dataclass(frozen=True)
class Successor:
    """Substitute of flags.

    Attributes:
        status: `RENAMED` or `GONE`.
        answer: what to write or do now.
        options: the old flags; ``*`` matches anything.
    """

    status: str
    answer: str
    options: tuple[str, ...]


def _renamed(answer: str, options: str) -> Successor:
    return Successor(RENAMED, answer, tuple(options.split()))


def _gone(answer: str, options: str) -> Successor:
    return Successor(GONE, answer, tuple(options.split()))


SUCCESSORS = (
    _renamed("`--multi-latent-attention`", "--multi-head-latent-attention"),
    _renamed("`--qk-head-dim`", "--qk-nope-head-dim"),
    _renamed("`--qk-pos-emb-head-dim`", "--qk-rope-head-dim"),
    _renamed("`--rope-type yarn`, with `--multi-latent-attention`", "--rope-scaling-type"),
    _renamed("`--rotary-scaling-factor`", "--yarn-scaling-factor"),
    _renamed(
        "`--rotary-scaling-factor`; the old name is Llama 3.1's factor here, with `--use-rope-scaling`",
        "--rope-scaling-factor",
    ),
    _renamed("`--original-max-position-embeddings`", "--rope-scaling-original-max-position-embeddings"),
    _renamed("`--beta-fast`", "--rope-scaling-beta-fast"),
    _renamed("`--beta-slow`", "--rope-scaling-beta-slow"),
    _renamed("`--mscale`", "--rope-scaling-mscale"),
    _renamed("`--mscale-all-dim`", "--rope-scaling-mscale-all-dim"),
    _renamed("`--tokenizer-model`, with `--tokenizer-type HuggingFaceTokenizer`", "--tokenizer-name-or-path"),
    _renamed("leave out `--disable-bias-linear`", "--add-dense-bias"),
    _renamed("`--optimizer-selection fused_ema_adamw` (announced: `mindspeed-optim`)", "--use-ema"),
    _renamed("`--layerzero` (announced: `mindspeed-optim`), or `--use-torch-fsdp2`", "--enable-zero3"),
    _renamed(
        "`--max-restarts`: the job goes on from its last checkpoint; `--hang-timeout-minutes` finds ranks "
        "that hang",
        "--ttp-*",
    ),
    _renamed("`mindspeed-train --nproc`, or torchrun's option", "--nproc-per-node"),
    _renamed("torchrun's option", "--nnodes --node-rank --master-addr --master-port --local-rank"),
    _gone("biases are added where megatron-core adds them", "--skip-bias-add"),
    _gone(
        "every setting is a flag; a plugin brings its own",
        "--additional-config",
    ),
    _gone("one framework: torch", "--ai-framework"),
    _gone("torch_npu's own default; set it with `torch.npu.set_compile_mode`", "--jit-compile"),
    _gone("priority of traffic is the network's to set", "--aiqos*"),
    _gone("models of several parts on different devices are not trained here", "--dist-train"),
    _gone(
        "8-bit formats need TransformerEngine's kernels or their counterpart on NPU: not here",
        "--fp8-reuse-quantized-weight --no-use-gmm-fp8 --te-gmm-mode --te-comparison-*",
    ),
    _gone("training with simulated quantization is not here", "--qat-scheme"),
    _gone(
        "sparse attention (DSA) is not here; its indexer and the loss of that are operators",
        "--apply-rope-in-complex --use-dsa-absorb --use-fused-lightning-indexer* "
        "--use-fused-sparse-flash-attention",
    ),
    _gone("linear attention (gated delta net) is not here", "--use-naive-l2norm"),
    _gone(
        "results that do not depend on the batch are not promised",
        "--use-batch-invariant-ops --use-flash-attn-npu-batch-invariant",
    ),
    _gone("`tokenizer.json` is read by the fast library; there is no slow one", "--tokenizer-not-use-fast"),
    _gone(
        "switches of the search's own measuring runs, which are not the user's to set",
        "--auto-parallel-profile --profile-memory --profile-operator",
    ),
)


def written_answers(status: str) -> Mapping[str, str]:
    """Return the answers of a status that are written down above, by flag of MindSpeed."""
    facts: Mapping[str, Mapping[str, list[str]]] = json.loads(FACTS.read_text(encoding="utf-8"))
    found = {option: _successor(option) for option in facts["flags"]}
    return {option: one.answer for option, one in found.items() if one is not None and one.status == status}


@dataclass(frozen=True)
class Answer:
    """Name the place of one flag of MindSpeed here."""

    option: str
    branches: tuple[str, ...]
    status: str
    text: str


def answers(registry: Registry) -> Iterator[Answer]:
    """Every flag of MindSpeed with what holds for it.

    Raises:
        ValueError: a flag has no answer, an answer belongs to no flag, or names a flag that does not exist.
    """
    facts: Mapping[str, Mapping[str, list[str]]] = json.loads(FACTS.read_text(encoding="utf-8"))
    flags = {option: entry for entry in flag_set(registry).entries for option in entry.flag.options}
    upstream = {
        answer.option: answer
        for answer in megatron_lm_answers.answers({option: entry.flag for option, entry in flags.items()})
    }
    _check_successors(set(flags) | set(flag_owners()), facts["flags"])
    for option, branches in facts["flags"].items():
        successor = _successor(option)
        if successor is not None:
            status, text = successor.status, successor.answer
        elif option in flags and flags[option].owner in registry.features:
            name = flags[option].owner
            dist = registry.features[name].dist
            status, text = HERE, f"[{name}](../features/{dist}/{name}.md) of {code(dist)}"
        elif option in upstream and upstream[option].status != megatron_lm_answers.SUPPORTED:
            status, text = GONE, upstream[option].reason
        elif option in flags:
            by_core = flags[option].owner == CORE_OWNER
            status, text = HERE, "the core" if by_core else "Megatron-LM's own; `mindspeed-train` has it"
            text += f": {upstream[option].reason}" if option in upstream and upstream[option].reason else ""
        elif option in flag_owners():
            status, text = ANNOUNCED, code(flag_owners()[option])
        else:
            raise ValueError(f"{option}: no answer in docs/mindspeed_flags.py")
        yield Answer(option, tuple(branches), status, text)


def _successor(option: str) -> Successor | None:
    return next((s for s in SUCCESSORS if any(fnmatchcase(option, o) for o in s.options)), None)


def _check_successors(known: set[str], old: Mapping[str, list[str]]) -> None:
    for successor in SUCCESSORS:
        unknown = [flag for flag in re.findall(r"`(--[a-z0-9-]+)", successor.answer) if flag not in known]
        if unknown:
            raise ValueError(f"{successor.answer!r} names flags that do not exist: {unknown}")
        idle = [o for o in successor.options if not any(fnmatchcase(flag, o) for flag in old)]
        if idle:
            raise ValueError(f"not flags of MindSpeed: {idle}")


def mindspeed_page(registry: Registry) -> str:
    """Every flag of MindSpeed, by what became of it."""
    found = list(answers(registry))
    branches = json.loads(FACTS.read_text(encoding="utf-8"))["branches"]
    counts = ", ".join(f"{sum(a.status == status for a in found)} {status}" for status in MEANINGS)
    lines = [
        "# MindSpeed's flags",
        "",
        f"The {len(found)} training flags that MindSpeed's branches {', '.join(map(code, branches))} add to",
        f"Megatron-LM's, and where they are found now: {counts}.",
        "[Moving from MindSpeed](../migration.md) says how the rest of a project moves.",
    ]
    for status, meaning in MEANINGS.items():
        rows = [
            (code(a.option), a.text, "all" if len(a.branches) == len(branches) else ", ".join(a.branches))
            for a in found
            if a.status == status
        ]
        lines += ["", f"## {status}", "", meaning, ""]
        lines += table(("old flag", "now", "branches that have it"), rows)
    return "\n".join(lines)

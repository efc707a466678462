"""The rule that makes tiny twins of launch scripts: the same flags, sizes shrunk, at most eight processes.

Parallel dimensions shrink to two (four where a flag divides one again), layers to one for each part of a
pipeline, widths to a few numbers; files, the length of the run and its learning rates are those of proofs
(`mindspeed_testing.model_flags`), and dropout is off, whose masks depend on layouts. Instruction data is made
up (`twin_data`). All other flags stay as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import checked_lines
from checked_lines import Script
from verdicts import digest, of_a_step

from mindspeed_core.flags.flag_set import flag_set
from mindspeed_megatron.upstream.translations import TRANSLATIONS

STEPS = 3
TOLERANCE = 1e-4
"""Largest relative error of losses and gradients in float32: sums of other orders, and fused operators."""
NEAR = 3e-2
"""Largest relative error of losses in 16 bits."""
AT_MOST = 8
"""Processes of a twin."""
NOT_IN_TWINS = frozenset(
    # Files, logs, checkpoints and evaluation.
    "--data-path --train-data-path --valid-data-path --test-data-path --data-args-path "
    "--per-split-data-args-path --data-cache-path --split --mock-data --vocab-file --merge-file "
    "--tokenizer-model --tokenizer-type --tokenizer-name-or-path --tiktoken-pattern --no-mmap-bin-files "
    "--save --load --pretrained-checkpoint --save-interval --save-retain-interval --async-save "
    "--exit-on-missing-checkpoint --finetune --no-load-optim --no-load-rng --no-save-optim --no-save-rng "
    "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler --use-checkpoint-args "
    "--tensorboard-dir --tensorboard-queue-size --wandb-save-dir --wandb-exp-name --wandb-project "
    "--wandb-entity --eval-iters --eval-interval --num-workers --skip-train "
    # The length of the run, and what depends on it.
    "--train-iters --train-samples --exit-interval --exit-duration-in-mins --lr-decay-iters "
    "--lr-decay-samples --lr-warmup-fraction --lr-warmup-iters --lr-warmup-samples --lr-warmup-init "
    "--rampup-batch-size --step-batch-size-schedule --lr --min-lr --decoupled-lr --decoupled-min-lr "
    "--lr-decay-style --lr-wsd-decay-style --adam-eps "
    # The vocabulary, random numbers.
    "--vocab-size --padded-vocab-size --make-vocab-size-divisible-by --attention-dropout --hidden-dropout "
    "--seed --use-cpu-initialization --fsdp2-config-path".split()
)
_SIZES: Mapping[str, int] = {
    "--hidden-size": 64,
    "--num-attention-heads": 8,
    "--num-query-groups": 4,
    "--ffn-hidden-size": 128,
    "--kv-channels": 16,
    "--seq-length": 32,
    "--max-position-embeddings": 32,
    "--moe-ffn-hidden-size": 32,
    "--moe-shared-expert-intermediate-size": 32,
    "--moe-router-topk": 2,
    "--moe-router-num-groups": 2,
    "--moe-router-group-topk": 1,
    "--n-group": 2,
    "--topk-group": 1,
    "--q-lora-rank": 32,
    "--kv-lora-rank": 16,
    "--qk-head-dim": 16,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 16,
    "--micro-batch-size": 2,
    "--recompute-num-layers": 1,
    "--recompute-activation-function-num-layers": 1,
    "--recompute-norm-num-layers": 1,
    "--first-k-dense-replace": 1,
    "--mtp-num-layers": 1,
    "--num-virtual-stages-per-pipeline-rank": 2,
    "--num-experts": 4,
    "--tp-x": 2,
    "--tp-y": 2,
}
"""The largest value of each size."""
_COUNTING = frozenset(
    "--recompute-num-layers --recompute-activation-function-num-layers --recompute-norm-num-layers".split()
)
_PRECISION = frozenset(
    "--bf16 --fp16 --initial-loss-scale --loss-scale --min-loss-scale --loss-scale-window "
    "--reuse-fp32-param --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32 "
    "--apply-query-key-layer-scaling "
    "--fp32-residual-connection --no-query-key-layer-scaling --o2-optimizer --o2-gradient --quant-grads "
    "--quant-states".split()
)
"""Flags that are of use in 16 bits alone."""
_LAYOUT = frozenset(
    "--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size "
    "--expert-model-parallel-size --expert-tensor-parallel-size --sequence-parallel "
    "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank "
    "--pipeline-model-parallel-layout --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
    "--microbatch-group-size-per-virtual-pipeline-stage --overlap-p2p-communication-warmup-flush "
    "--cp-comm-type --hierarchical-context-parallel-sizes --use-tp-pp-dp-mapping "
    "--num-distributed-optimizer-instances --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --overlap-param-gather-with-optimizer-step --use-megatron-fsdp "
    "--use-custom-fsdp --data-parallel-sharding-strategy --use-torch-fsdp2 --delay-wgrad-compute "
    "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type --moe-enable-deepep "
    "--moe-flex-dispatcher-backend --defer-embedding-wgrad-compute --wgrad-deferral-limit "
    "--recompute-granularity --recompute-method --recompute-num-layers --recompute-modules "
    "--moe-permute-fusion --ckpt-format --noop-layers".split()
)
"""Flags of the host that lay a model out, or compute the same in another order."""
_MODEL = frozenset(
    "--n-shared-experts --moe-model-type --moe-train-capacity-factor --alibi-fusion-attn-type "
    "--is-instruction-dataset --pack-samples --no-shuffle --lora-r --lora-alpha --lora-target-modules "
    "--moe-router-best-of-group --moe-shared-expert-gate --muon-fp32-matmul-prec --muon-momentum "
    "--muon-extra-scale-factor --muon-scale-mode".split()
)
"""Flags of features that say which model is trained: the twin's reference has them too."""
_LOCAL = frozenset("--moe-expert-capacity-factor --moe-train-capacity-factor".split())
"""Flags that decide something from the tokens of one rank, so that it depends on the layout."""

_NOT_PLAIN = frozenset("--no-pad-to-seq-lengths --use-mc2 --use-custom-fsdp".split())
"""Other spellings of what a feature does, without which its reference has to train the same."""
_CONVERSATIONS = ("{files}/conversations",)

Flags = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Twin:
    """A tiny twin and what it is compared with; equal for all scripts that shrink to the same.

    Attributes:
        flags: the flags of the twin, in the precision of the script.
        plain: the flags of the reference, in float32 and without features.
        world_size: processes of the twin.
        plain_world_size: processes of the reference.
    """

    flags: tuple[str, ...]
    plain: tuple[str, ...]
    world_size: int
    plain_world_size: int = 1

    def in_float32(self) -> tuple[str, ...]:
        """Return the flags without those of 16 bits."""
        flags = _by_option(self.flags)
        return _words({option: words for option, words in flags.items() if option not in _PRECISION})

    @property
    def key(self) -> str:
        """Return the digest under which its outcome is kept."""
        sides = (of_a_step(self.flags), of_a_step(self.plain))
        return digest(STEPS, TOLERANCE, NEAR, *sides, self.world_size, self.plain_world_size)

    @property
    def has_16_bits(self) -> bool:
        """Return whether the script trains in 16 bits."""
        return "--bf16" in self.flags or "--fp16" in self.flags


@dataclass
class Layout:
    """Sizes of the parallel dimensions of a twin."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    data: int = 1
    parts: int = 1
    """Model chunks of one pipeline rank."""

    @property
    def least(self) -> int:
        """Return the fewest ranks that hold the model and its experts."""
        dense = self.tensor * self.pipeline * self.context
        return math.lcm(dense, self.expert_tensor * self.expert * self.pipeline)

    @property
    def world_size(self) -> int:
        """Return the ranks."""
        return self.least * self.data

    @property
    def data_parallel_size(self) -> int:
        """Return the ranks that see other samples."""
        return self.world_size // (self.tensor * self.pipeline * self.context)


def twin_of(script: Script) -> Twin:
    """Return the twin of an accepted script."""
    given = _by_option(script.words)
    layout = _layout(given)
    flags = {
        option: _shrunk(option, words, given, layout)
        for option, words in given.items()
        if option not in NOT_IN_TWINS and (option in _owners() or option in TRANSLATIONS)
    }
    if "--is-instruction-dataset" in flags or flags.get("--stage") == ("sft",):
        flags |= {"--data-path": _CONVERSATIONS, "--split": ("1,0,0",)}
    if flags.get("--dataloader-type") == ("cyclic",):
        # Ranks that shuffle a part of the data each see other samples than one process does.
        flags["--no-data-sharding"] = ()
    if flags.get("--optimizer", ("adam",))[0] in ("muon", "dist_muon"):
        # Products of bfloat16 numbers, its default, would hide what layouts do.
        flags["--muon-fp32-matmul-prec"] = ("high",)
    unit = layout.data_parallel_size * int(flags.get("--micro-batch-size", ("1",))[0])
    batch = unit * max(2, 2 * layout.pipeline)
    flags["--global-batch-size"] = (str(batch),)
    if "--fp16" in flags:
        # The usual first scale makes no step before it has been halved often.
        flags["--initial-loss-scale"] = ("4096",)
    local = bool(_LOCAL & given.keys()) or given.get("--moe-router-load-balancing-type") == ("sinkhorn",)
    plain = {
        option: words
        for option, words in flags.items()
        if option in _MODEL
        or (option not in _PRECISION and _kept(option, local) and (local or option not in _LAYOUT))
    }
    if "--noop-layers" in flags and not local:
        plain["--num-layers"] = (str(_layers(given, layout) - len(flags["--noop-layers"][0].split(","))),)
    return Twin(_words(flags), _words(plain), layout.world_size, layout.world_size if local else 1)


def _kept(option: str, local: bool) -> bool:
    """Return whether the reference has a flag too: those of no feature, and for a layout its own."""
    if option in _NOT_PLAIN:
        return False
    owner = _owners().get(option, "")
    return owner in ("", "host standalone", "core") or (local and owner == "context-parallel")


def _owners() -> Mapping[str, str]:
    """Return who declares an option, for options of the standalone host."""
    if not _OWNERS:
        known = flag_set(checked_lines.installed(), "standalone")
        _OWNERS.update({option: entry.owner for entry in known.entries for option in entry.flag.options})
    return _OWNERS


_OWNERS: dict[str, str] = {}


def _by_option(words: Sequence[str]) -> Flags:
    """Return the words behind each option; the last of several wins."""
    found: dict[str, list[str]] = {}
    option = ""
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            found[option] = [value] if equals else []
        elif option:
            found[option].append(word)
    return {option: tuple(values) for option, values in found.items()}


def _words(flags: Flags) -> tuple[str, ...]:
    return tuple(word for option, words in flags.items() for word in (option, *words))


def _number(given: Flags, option: str, default: int = 1) -> int:
    return int(given.get(option, (str(default),))[0])


def _layout(given: Flags) -> Layout:
    tensor, pipeline = (
        _number(given, "--tensor-model-parallel-size"),
        _number(given, "--pipeline-model-parallel-size"),
    )
    context, expert = (
        _number(given, "--context-parallel-size"),
        _number(given, "--expert-model-parallel-size"),
    )
    uneven = ("--pipeline-num-transformer-layers", "--decoder-first-pipeline-num-layers")
    divided = (
        given.get("--context-parallel-algo") == ("hybrid_cp_algo",) or _number(given, "--cp-window-size") > 1
    )
    layout = Layout(
        tensor=min(tensor, 4 if "--tp-2d" in given else 2),
        pipeline=min(pipeline, 4 if any(option in given for option in uneven) else 2),
        context=min(context, 4 if divided else 2),
        expert=min(expert, 2),
        expert_tensor=1,
    )
    # With stages that lie last, experts have the data-parallel size of the other layers.
    widest = layout.tensor * (layout.context if "--use-tp-pp-dp-mapping" in given else 1)
    layout.expert_tensor = min(_number(given, "--expert-tensor-parallel-size", tensor), widest)
    while layout.least > AT_MOST and layout.tensor > 1:
        layout.tensor, layout.expert_tensor = layout.tensor // 2, 1
    layout.parts = _parts(given, pipeline)
    wanted = 2 if _number(given, "--num-distributed-optimizer-instances") > 1 or layout.least < 4 else 1
    if wanted * layout.least <= AT_MOST:
        layout.data = wanted
    return layout


def _parts(given: Flags, pipeline: int) -> int:
    """Return into how many chunks a pipeline rank of the twin is cut."""
    layers = _number(given, "--num-layers")
    if "--num-layers-per-virtual-pipeline-stage" in given:
        return min(2, layers // pipeline // _number(given, "--num-layers-per-virtual-pipeline-stage"))
    if "--pipeline-model-parallel-layout" in given:
        return 2 if _stages(given["--pipeline-model-parallel-layout"][0]) > pipeline else 1
    if given.get("--schedules-method") == ("dualpipev",):
        return 2
    return min(2, _number(given, "--num-virtual-stages-per-pipeline-rank"))


def _stages(layout: str) -> int:
    """Return how many parts a string of ``--pipeline-model-parallel-layout`` has."""
    repeated = re.sub(r"\(([^)]*)\)\*(\d+)", lambda m: m.group(1) * int(m.group(2)), layout.strip('"'))
    return len([part for part in repeated.split("|") if part])


def _layers(given: Flags, layout: Layout) -> int:
    if "--pipeline-num-transformer-layers" in given:
        return sum(map(sum, _lists(given["--pipeline-num-transformer-layers"][0])))
    if "--num-layer-list" in given:
        return layout.pipeline + 1
    if "--account-for-embedding-in-pipeline-split" in given:
        # The embedding and the loss count as a layer each.
        return 2 * layout.pipeline * layout.parts - 2
    # Where layers of a chunk are counted, one is to be left.
    alone = layout.parts == 1 and layout.pipeline == 1
    return layout.pipeline * layout.parts * (2 if alone or given.keys() & _COUNTING else 1)


def _lists(text: str) -> list[list[int]]:
    """Return the lists of ``[[0,1],[1,1]*2]``."""
    found: list[list[int]] = []
    for inner, times in re.findall(r"\[([\d,]+)\](?:\*(\d+))?", text):
        found += [[int(number) for number in inner.split(",")]] * int(times or 1)
    return found


def _shrunk(option: str, words: tuple[str, ...], given: Flags, layout: Layout) -> tuple[str, ...]:
    special = _SPECIAL.get(option)
    if special is not None:
        return special(words, given, layout)
    if option in _SIZES and words:
        return (str(min(int(words[0]), _SIZES[option])),)
    return words


def _dense_first(words: tuple[str, ...], given: Flags, layout: Layout) -> tuple[str, ...]:
    if words[0].lstrip("-").isdigit():
        return words
    return (f"([0]*1+[1]*{_layers(given, layout) - 1})",)


def _noop(words: tuple[str, ...], given: Flags, layout: Layout) -> tuple[str, ...]:
    last = _layers(given, layout) - 1
    places = {min(int(place), last) for place in words[0].split(",")}
    return (",".join(map(str, sorted(places))),)


def _layer_list(words: tuple[str, ...], given: Flags, layout: Layout) -> tuple[str, ...]:
    return (",".join(["1"] * (layout.pipeline - 1) + ["2"]),)


def _pipeline_layout(words: tuple[str, ...], given: Flags, layout: Layout) -> tuple[str, ...]:
    stages = ["t"] * (layout.pipeline * layout.parts)
    end = "mL" if "m" in words[0] else "L"
    return (f"E{'|'.join(stages)}{end}",)


def _context_sizes(words: tuple[str, ...], given: Flags, layout: Layout) -> tuple[str, ...]:
    return ("1", str(layout.context))


_SPECIAL: Mapping[str, Callable[[tuple[str, ...], Flags, Layout], tuple[str, ...]]] = {
    "--tensor-model-parallel-size": lambda words, given, layout: (str(layout.tensor),),
    "--pipeline-model-parallel-size": lambda words, given, layout: (str(layout.pipeline),),
    "--context-parallel-size": lambda words, given, layout: (str(layout.context),),
    "--expert-model-parallel-size": lambda words, given, layout: (str(layout.expert),),
    "--expert-tensor-parallel-size": lambda words, given, layout: (str(layout.expert_tensor),),
    "--num-layers-per-virtual-pipeline-stage": lambda words, given, layout: (
        str(_layers(given, layout) // layout.pipeline // layout.parts),
    ),
    "--num-layers": lambda words, given, layout: (str(_layers(given, layout)),),
    "--decoder-first-pipeline-num-layers": lambda words, given, layout: ("1",),
    "--decoder-last-pipeline-num-layers": lambda words, given, layout: ("1",),
    "--microbatch-group-size-per-virtual-pipeline-stage": lambda words, given, layout: (
        str(layout.pipeline),
    ),
    "--moe-layer-freq": _dense_first,
    "--noop-layers": _noop,
    "--num-layer-list": _layer_list,
    "--pipeline-model-parallel-layout": _pipeline_layout,
    "--hierarchical-context-parallel-sizes": _context_sizes,
}

"""Tiny twins of launch scripts: the same flags with sizes shrunk, trained on at most eight CPU processes.

One rule makes every twin. Parallel dimensions shrink to two (four where a flag divides one again), layers to
one for each part of a pipeline, widths to a few numbers; files, the length of the run and its learning rates
are those of proofs (`mindspeed_testing.model_flags`), and dropout is off, whose masks depend on layouts.
All other flags stay as they are.

A twin is compared with one process that trains the same model in float32 without any feature. In float32 its
losses and gradients have to be equal; in the precision of the script its losses have to be near.

``python tests/launch_scripts/twins.py [SOURCE …] [--part K/N] [--ranks A-B] [--check]`` trains the twins, and
says what differs.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import checked_lines
from checked_lines import Script

from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.validation import check
from mindspeed_testing.canonical import CanonicalState, matches
from mindspeed_testing.compare_sides import compare_sides
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.training import (
    RankRecord,
    SideRequest,
    SideResult,
    joined_ranks,
    train_rank,
    train_side,
)
from mindspeed_testing.worlds import run_world

STEPS = 3
TOLERANCE = 1e-4
"""Largest relative error of losses and gradients in float32: sums of other orders, and fused operators."""
NEAR = 3e-2
"""Largest relative error of losses in 16 bits."""
AT_MOST = 8

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
    "--rampup-batch-size --lr --min-lr --decoupled-lr --decoupled-min-lr --lr-decay-style "
    "--lr-wsd-decay-style --adam-eps "
    # The vocabulary, random numbers.
    "--vocab-size --padded-vocab-size --make-vocab-size-divisible-by --attention-dropout --hidden-dropout "
    "--seed --use-cpu-initialization".split()
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
    "--fp32-residual-connection --no-query-key-layer-scaling".split()
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
    "--n-shared-experts --moe-model-type --moe-train-capacity-factor --alibi-fusion-attn-type".split()
)
"""Flags of features that say which model is trained: the twin's reference has them too."""
_LOCAL = frozenset("--moe-expert-capacity-factor --moe-train-capacity-factor".split())
"""Flags that decide something from the tokens of one rank, so that it depends on the layout."""

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
        if option not in NOT_IN_TWINS and (option in _owners() or option in _JUDGED_SIZES)
    }
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
    owner = _owners().get(option, "")
    return owner in ("", "host standalone", "core") or (local and owner == "context-parallel")


def _owners() -> Mapping[str, str]:
    """Return who declares an option, for options of the standalone host."""
    if not _OWNERS:
        known = flag_set(checked_lines.installed(), "standalone")
        _OWNERS.update({option: entry.owner for entry in known.entries for option in entry.flag.options})
    return _OWNERS


_OWNERS: dict[str, str] = {}
_JUDGED_SIZES = ("--first-k-dense-replace", "--moe-intermediate-size", "--no-position-embedding")


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
    layout.expert_tensor = min(_number(given, "--expert-tensor-parallel-size", tensor), layout.tensor)
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
    return (",".join(str(min(int(place), last)) for place in words[0].split(",")),)


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
    "--pipeline-model-parallel-layout": _pipeline_layout,
    "--hierarchical-context-parallel-sizes": _context_sizes,
}


@dataclass
class Trained:
    """The outcome of a twin: what differs, one line each; nothing where all is as it should be."""

    largest: float
    features: tuple[str, ...]
    differences: list[str] = field(default_factory=list)


_references: dict[tuple[tuple[str, ...], int], SideResult] = {}


def train(twin: Twin, timeout: float = 300.0) -> Trained:
    """Train a twin beside its reference, and compare.

    Raises:
        mindspeed_testing.worlds.WorldError: one of them does not train.
    """
    key = (twin.plain, twin.plain_world_size)
    if key not in _references:
        _references[key] = train_side(*key, STEPS, timeout=timeout)
    reference = _references[key]
    commands = [twin.in_float32(), *([twin.flags] if twin.has_16_bits else [])]
    sides = _train_sides(commands, twin.world_size, reference.initial, timeout)
    exact, _ = compare_sides(
        sides[0], reference, tolerance=TOLERANCE, quantities=_COMPARED, demanded=_COMPARED
    )
    found = Trained(exact.largest, sides[0].features)
    wrong = [each for each in exact.failures() if not matches(each.key, _ZERO_GRADIENTS)]
    found.differences += [f"float32: {difference}" for difference in wrong[:8]]
    for side in sides[1:]:
        near, _ = compare_sides(
            side, reference, tolerance=NEAR, quantities=_COMPARED[:1], demanded=_COMPARED[:1]
        )
        found.features = side.features
        found.differences += [f"16 bits: {difference}" for difference in near.failures()[:8]]
    return found


_COMPARED = ("losses", "gradients")
_ZERO_GRADIENTS = ("*.k_layernorm.bias",)
"""Parameters whose gradient is zero up to rounding: all keys moved alike leave the softmax as it is."""


def _train_sides(
    commands: Sequence[Sequence[str]], world_size: int, initial: CanonicalState, timeout: float
) -> list[SideResult]:
    """Train several command lines in one world, one after the other."""
    length = STEPS + 1
    requests = [
        SideRequest(training_flags(flags, length), STEPS, initial, gradients=not number)
        for number, flags in enumerate(commands)
    ]
    ranks: list[list[RankRecord]] = run_world(train_all, world_size, requests, timeout=timeout)
    return [joined_ranks([rank[number] for rank in ranks]) for number in range(len(requests))]


def train_all(requests: Sequence[SideRequest]) -> list[RankRecord]:
    """Train one rank of several sides."""
    return [train_rank(request) for request in requests]


def twins(sources: Sequence[str] = tuple(checked_lines.SOURCES)) -> dict[Twin, list[str]]:
    """Return the twins of all accepted scripts, each once, with the names of its scripts."""
    found: dict[Twin, list[str]] = {}
    for script in accepted(sources):
        if "--skip-train" not in script.words:
            found.setdefault(twin_of(script), []).append(f"{script.source}:{script.name}")
    return found


def accepted(sources: Sequence[str]) -> Iterator[Script]:
    """Yield the scripts that the record calls accepted."""
    record = checked_lines.kept()
    for source in sources:
        names = {*record[source]["accepted"]}
        yield from (script for script in checked_lines.scripts(source) if script.name in names)


def problems_of(twin: Twin) -> list[str]:
    """Return what is wrong with the flags of a twin and its reference, without training them."""
    found = []
    sides = (
        ("own precision", twin.flags, twin.world_size),
        ("float32", twin.in_float32(), twin.world_size),
        ("reference", twin.plain, twin.plain_world_size),
    )
    for name, flags, size in sides:
        whole = training_flags(flags, STEPS, checked_lines.installed())
        checked = check(whole, world_size=size, platform="cpu", registry=checked_lines.installed())
        found += [f"{name}: {problem}" for problem in checked.problems]
    return found


def main(arguments: Sequence[str]) -> None:
    """Train twins and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", choices=(*checked_lines.SOURCES, []), help="whose scripts")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th twin, from the K-th on")
    parser.add_argument("--ranks", default=f"1-{AT_MOST}", help="twins of so many ranks")
    parser.add_argument("--check", action="store_true", help="only check their flags")
    args = parser.parse_args(arguments)
    number, count = map(int, args.part.split("/"))
    least, most = map(int, args.ranks.split("-"))
    found = twins(args.sources or tuple(checked_lines.SOURCES))
    chosen = [twin for twin in found if least <= twin.world_size <= most][number - 1 :: count]
    for twin in sorted(chosen, key=lambda twin: twin.world_size):
        started = time.monotonic()
        lines = problems_of(twin) if args.check else _trained(twin)
        seconds = time.monotonic() - started
        names = found[twin]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(
            f"{'BAD' if lines else 'ok ':4}{twin.world_size} ranks {seconds:6.1f} s  {names[0]}{more}",
            flush=True,
        )
        for line in lines:
            print(f"    {line}")
        if lines:
            print(
                f"    {shlex.join(twin.flags)}\n    beside {twin.plain_world_size}: {shlex.join(twin.plain)}",
                flush=True,
            )
    print(f"{len(chosen)} of {len(found)} twins", flush=True)


def _trained(twin: Twin) -> list[str]:
    try:
        return train(twin).differences
    except Exception as error:
        # The other twins are to be seen too.
        return [f"{type(error).__name__}: {line}" for line in str(error).splitlines()[-6:]]


if __name__ == "__main__":
    main(sys.argv[1:])

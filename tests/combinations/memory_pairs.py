"""Every pair of memory features on a layout of the lagging device: the bits of that layout, or a refusal.

All of these features promise the bits of a training without them, so that a pair is compared to the layout
alone. What the resolver refuses, and flags of which one value alone can be given, is not trained. Where one
of two stands down beside the other, the plan says so. More than two may be trained together: where all of
them act and the bits stay, they are a proof of each of their pairs.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from tempfile import gettempdir

from mindspeed_core.activation import plan_for
from mindspeed_core.errors import UserError
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_testing.lagging.runs import Outcome, Training, outcomes
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.worlds import WorldError, run_world

EQUAL, REFUSED, STANDS_DOWN = "equal", "refused: ", "stands down: "
_LLAMA = (
    "--hidden-dropout 0.1 --swiglu --normalization RMSNorm --position-embedding-type rope --use-flash-attn "
    "--bf16 --grad-reduce-in-bf16"
)
_DENSE = f"{_LLAMA} --num-layers 3 --global-batch-size 2"
_DEEP = f"{_LLAMA} --num-layers 4 --global-batch-size 4"
_EXPERTS = (
    f"{_DENSE} --num-layers 2 --disable-bias-linear --num-experts 4 --moe-router-topk 2 "
    "--moe-router-dtype fp32 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall "
    "--moe-grouped-gemm --moe-alltoall-overlap-comm --moe-router-force-load-balancing"
)
"""Forced balance draws the experts of each token anew: what is computed again has to draw the same."""
LAYOUTS = {
    "one process": (1, _DENSE),
    "data parallelism": (
        2,
        f"{_DENSE} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "tensor parallelism": (2, f"{_DENSE} --tensor-model-parallel-size 2 --sequence-parallel"),
    "pipeline parallelism": (
        2,
        f"{_DEEP} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
    "expert parallelism": (2, f"{_EXPERTS} --expert-model-parallel-size 2"),
}
"""Ranks and flags of the side without a feature."""

_FULL = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
_SELECTIVE = "--recompute-granularity selective --recompute-modules"
_BYTES = "--swap-min-bytes 1"
_PLANNED = "--adaptive-recompute-profiling-step 5"
_ELEMENTS = "--compress-min-elements 1"
_EVERYWHERE = {
    "recompute-activation": "--recompute-activation-function",
    "recompute-norm": "--recompute-norm",
    "recompute-layers": _FULL,
    "recompute-layers-per-pp-rank": f"{_FULL} --enable-recompute-layers-per-pp-rank",
    "recompute-dense-mlp": f"{_SELECTIVE} mlp",
    "selected norms": f"{_SELECTIVE} layernorm",
    "selected attention": f"{_SELECTIVE} core_attn",
    "recompute-plan": "--recompute-plan decoder.layers.*.mlp",
    "swap-attention": f"--swap-attention {_BYTES}",
    "swap-attention of norms and feed-forward parts": (
        f"--swap-attention --swap-modules input_norm,post_attention_norm,mlp {_BYTES}"
    ),
    "swap-layer-input": f"{_FULL} --swap-layer-input {_BYTES}",
    "swap-activation-plan": f"--swap-activation-plan decoder.layers.* {_BYTES}",
    "smart-swap": f"--smart-swap {_BYTES}",
    "adaptive-recompute": f"--adaptive-recompute-device-swap {_PLANNED}",
    "adaptive-memory": f"--adaptive-memory-optimization {_PLANNED} {_BYTES}",
    "compress-activation": f"--compress-activation 0 {_ELEMENTS}",
    "compress-dense": f"--compress-dense level1 {_ELEMENTS}",
    "swap-optimizer": "--swap-optimizer",
    "virtual-optimizer": "--virtual-optimizer all",
    "compress-optimizer": "--compress-optimizer",
    "reuse-fp32-param": "--reuse-fp32-param",
    "release-fp32-grad": "--release-fp32-grad",
    "memory-fragmentation": "--memory-fragmentation-pools",
    "memory-report": f"--memory-report --memory-report-path {gettempdir()}/memory-report-of-pairs",
}
_OF_LAYOUTS = {
    "pipeline parallelism": {
        "recompute-in-advance": f"{_FULL} --recompute-in-advance",
        "recompute-in-bubble": "--recompute-in-bubble",
        "stages computed again": "--pipeline-schedule zbi --pipeline-recompute",
        "nanopipe's operands on the host": "--use-nanopipe-swap",
    },
    "tensor parallelism": {
        "recompute-comm": f"{_FULL} --recompute-method uniform --optimize-recomp-communication-level 2",
    },
    "expert parallelism": {
        "selected activations of experts": f"{_SELECTIVE} moe_act",
        "selected experts": f"{_SELECTIVE} moe",
        "moe-zero-memory, level 0": "--moe-zero-memory level0",
        "moe-zero-memory, level 1": "--moe-zero-memory level1",
        "moe-adaptive-recompute": (
            "--moe-adaptive-recompute-activation --moe-adaptive-recompute-activation-scale 0.4"
        ),
    },
}
_BASES = {
    "nanopipe's operands on the host": "--pipeline-schedule nanopipe",
    # Under its tracker compiled dropout runs as it is, which draws other values.
    "memory-report": "--no-bias-dropout-fusion",
}
"""Flags of both sides, where a feature is an option of something else, or says itself what it changes."""
_OF_MEGATRON_CORE = frozenset(
    {
        *("recompute-layers", "selected norms", "selected attention"),
        *("selected activations of experts", "selected experts"),
    }
)
"""What no plan lists: megatron-core does it by itself."""
_DECLARED = {
    "swap-attention of norms and feed-forward parts": "swap-attention",
    "stages computed again": "pp-engine",
    "nanopipe's operands on the host": "pp-engine",
    "moe-zero-memory, level 0": "moe-zero-memory",
    "moe-zero-memory, level 1": "moe-zero-memory",
}
"""Features whose name is not that of the entry."""
_RECORDED = {
    **dict.fromkeys(
        (
            *("swap-attention", "swap-attention of norms and feed-forward parts"),
            *("swap-layer-input", "swap-activation-plan", "smart-swap"),
        ),
        "swapped bytes",
    ),
    **dict.fromkeys(("compress-activation", "compress-dense"), "compressed bytes"),
    **dict.fromkeys(("adaptive-recompute", "adaptive-memory"), "planned bytes"),
    **dict.fromkeys(("recompute-in-advance", "recompute-in-bubble"), "early recomputations"),
    "nanopipe's operands on the host": "pipeline bytes to the host",
    "moe-adaptive-recompute": "moe crowded calls",
}
"""The number of a step that is above 0 where a feature acted; the others refuse to place nothing."""
_MEASURES = "smart-swap"
"""It chooses by times that it measured, and may choose nothing."""
_UNITED = "--recompute-modules"


@dataclass(frozen=True)
class Together:
    """Memory features on a layout.

    Attributes:
        layout: a name of `LAYOUTS`.
        names: of `features_of` the layout; two, or more.
    """

    layout: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.layout}: {', '.join(self.names)}"

    @property
    def base(self) -> tuple[str, ...]:
        """Return the flags of the side without the features."""
        return tuple(f"{LAYOUTS[self.layout][1]} {self._of_both_sides()}".split())

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags of the side with them."""
        options: dict[str, tuple[str, ...]] = {}
        for values in self._options():
            for flag, value in values.items():
                options[flag] = (*options.get(flag, ()), *value) if flag == _UNITED else value
        return (*self.base, *(word for flag, value in options.items() for word in (flag, *value)))

    @property
    def steps(self) -> int:
        """Return after how many steps all of it has begun: plans follow five steps of measuring."""
        return 7 if any(name.startswith("adaptive") for name in self.names) else 5

    def exclusive(self) -> str:
        """Return the flag of which two of them want another value; empty where there is none."""
        wanted: dict[str, tuple[str, ...]] = {}
        for values in self._options():
            for flag, value in values.items():
                if flag != _UNITED and wanted.setdefault(flag, value) != value:
                    return flag
        return ""

    def inactive(self, active: Collection[str]) -> list[str]:
        """Return those that are not among the active features of a plan."""
        declared = {name: _DECLARED.get(name, name) for name in self.names if name not in _OF_MEGATRON_CORE}
        return [name for name, feature in declared.items() if feature not in active]

    def unseen(self, ended: Sequence[Outcome]) -> list[str]:
        """Return those of which no rank recorded that they did anything."""
        return [
            name
            for name in self.names
            if name in _RECORDED and not any(one.recorded.get(_RECORDED[name]) for one in ended)
        ]

    def _of_both_sides(self) -> str:
        return " ".join(_BASES[name] for name in self.names if name in _BASES)

    def _options(self) -> Iterator[dict[str, tuple[str, ...]]]:
        features = features_of(self.layout)
        return (_options_of(features[name].split()) for name in self.names)


def features_of(layout: str) -> dict[str, str]:
    """Return the flags of the memory features of a layout, by name."""
    return {**_EVERYWHERE, **_OF_LAYOUTS.get(layout, {})}


def pairs_of(layout: str) -> list[Together]:
    """Return all pairs of a layout."""
    return [Together(layout, names) for names in combinations(features_of(layout), 2)]


def drawn_pairs(layout: str, count: int, seed: int) -> list[Together]:
    """Return some pairs of a layout of which both are active."""
    found = pairs_of(layout)
    random.Random(f"{layout} {seed}").shuffle(found)
    active: list[Together] = []
    for pair in found:
        if len(active) < count and not untrained(pair):
            active.append(pair)
    return active


def untrained(together: Together) -> str:
    """Return why features are not trained together; empty where they are.

    Returns:
        `REFUSED` with the reason, or `STANDS_DOWN` with those that are not active beside the others, of which
        the plan says so.
    """
    flag = together.exclusive()
    if flag:
        return f"{REFUSED}{flag} has one value"
    registry = _installed()
    line = training_flags(together.flags, together.steps, registry)
    try:
        plan, _ = plan_for(line, platform="lagging", registry=registry, host="standalone")
    except (PlanError, UserError) as error:
        return f"{REFUSED}{error}"
    inactive = together.inactive(plan.names)
    return f"{STANDS_DOWN}{', '.join(inactive)}" if inactive else ""


def verdicts(all_of: Sequence[Together]) -> dict[Together, str]:
    """Train features of one layout in one world.

    Returns:
        `EQUAL`, what `untrained` says, `STANDS_DOWN` where one chose to do nothing, or what is wrong.
    """
    found = {one: reason for one in all_of if (reason := untrained(one))}
    left = [one for one in all_of if one not in found]
    if not left:
        return found
    ranks = LAYOUTS[left[0].layout][0]
    bases = list(dict.fromkeys((one.base, one.steps) for one in left))
    trainings = [*(Training(*base) for base in bases), *(Training(one.flags, one.steps) for one in left)]
    try:
        of_ranks = run_world(outcomes, ranks, trainings, timeout=120 + 60 * len(trainings))
    except WorldError as error:
        return {**found, **dict.fromkeys(left, str(error))}
    without = dict(zip(bases, zip(*of_ranks)))
    for one, ended in zip(left, list(zip(*of_ranks))[len(bases) :]):
        found[one] = _verdict(one, ended, without[one.base, one.steps])
    return found


@cache
def _installed() -> Registry:
    return Registry.discover()


def _verdict(together: Together, ended: Sequence[Outcome], without: Sequence[Outcome]) -> str:
    broken = next((one.error for one in without if one.error), "")
    if broken:
        return f"the layout alone: {broken}"
    error = next((one.error for one in ended if one.error), "")
    if error.startswith(("PlanError", "ArgumentError", "UserError")):
        return f"{REFUSED}{error}"
    if error:
        return error
    if list(ended) != list(without):
        return f"{ended[0]}, without {without[0]}"
    unseen = together.unseen(ended)
    if unseen == [_MEASURES]:
        # Its log says that nothing can be copied in time.
        return f"{STANDS_DOWN}{_MEASURES}"
    return f"equal bits, and nothing was done by {', '.join(unseen)}" if unseen else EQUAL


def _options_of(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    options: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            options[name := word] = ()
        else:
            options[name] = (*options[name], word)
    return options

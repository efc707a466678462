"""Proofs of what the optimizer keeps: a model trains as with torch's AdamW, to the bit."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario
from mindspeed_memory.features.proofs import fully_sharded

BF16 = ("--bf16", "--clip-grad", "0.5")
SHARDED = ("--use-distributed-optimizer",)
OVERLAPS = (*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
FP16 = ("--fp16", "--initial-loss-scale", "1024", "--clip-grad", "0.5")
HALF_GRADIENTS = ("--grad-reduce-in-bf16",)
REUSE = ("--reuse-fp32-param",)
RELEASE = ("--release-fp32-grad",)
SWAP = ("--swap-optimizer", "--swap-optimizer-times", "5")
VIRTUAL = ("--virtual-optimizer", "all")
COMPRESS = ("--compress-optimizer",)


def as_without(
    name: str,
    *layout: str,
    flags: tuple[str, ...],
    ranks: int = 2,
    model: tuple[str, ...] = BF16,
    gains: tuple[Gain, ...] = (),
    steps: int = 4,
) -> Scenario:
    """Compare a training with a feature to the same one without it, on the same ranks, bit for bit.

    Args:
        name: of the scenario.
        layout: flags of both sides.
        flags: of the feature.
        ranks: processes.
        model: further flags of both sides.
        gains: what must be better.
        steps: that are compared.
    """
    return Scenario(
        name,
        flags=(*model, *layout, *flags),
        baseline=(*model, *layout),
        world_size=ranks,
        steps=steps,
        tolerance=0.0,
        gains=gains,
    )


def layouts(
    flags: tuple[str, ...], gains: tuple[Gain, ...] = (), model: tuple[str, ...] = BF16, steps: int = 4
) -> tuple[Scenario, ...]:
    """Return proofs under the layouts that change what an optimizer holds."""
    each = {
        "dp2-distributed-optimizer": SHARDED,
        "dp2": (),
        "dp2-overlaps": OVERLAPS,
        "tp2-sp": TP2,
        "pp2": (*PP2, *SHARDED),
    }
    return tuple(
        as_without(name, *layout, flags=flags, model=model, gains=gains, steps=steps)
        for name, layout in each.items()
    )


def resumed(flags: tuple[str, ...], model: tuple[str, ...] = BF16) -> Scenario:
    """Continue a checkpoint with the feature and without it, bit for bit; the latter without overlaps."""
    return Scenario(
        "resume",
        flags=(*model, *OVERLAPS, *flags),
        world_size=2,
        tolerance=0.0,
        resume=Resume(flags=(*model, *SHARDED), world_size=2, with_feature=False),
    )


_SAME_BYTES = (Gain("optimizer_bytes", 1.0),)
_FIVE_SIXTHS = (Gain("optimizer_bytes", 0.84),)
_EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--swiglu"),
    *("--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall"),
    *("--expert-model-parallel-size", "2"),
)
# Residuals and ties go from step to step.
_MANY = 12
_TWO = as_without("bytes", *SHARDED, flags=REUSE, gains=_FIVE_SIXTHS)
REUSE_PROOFS = (
    _TWO,
    *layouts(REUSE, _FIVE_SIXTHS, steps=_MANY),
    as_without("one-rank", flags=REUSE, ranks=1, steps=_MANY),
    as_without("one-rank-distributed-optimizer", *SHARDED, flags=REUSE, ranks=1, steps=_MANY),
    as_without("experts", *SHARDED, *_EXPERTS, flags=REUSE, steps=_MANY),
    as_without("signs", *SHARDED, flags=(*REUSE, "--reuse-fp32-ties", "sign")),
    as_without("16-bit-gradients", *SHARDED, *HALF_GRADIENTS, flags=REUSE),
    resumed(REUSE),
)
BLOCK_PROOFS = (_TWO, resumed(REUSE))
_STEP = (Gain("step_peak_bytes", 0.95), *_SAME_BYTES)
_HALF = (*BF16, *HALF_GRADIENTS)
RELEASE_PROOFS = (
    *layouts(RELEASE, _STEP, _HALF),
    as_without("never-clipped", *SHARDED, model=(*_HALF, "--clip-grad", "1000"), flags=RELEASE),
    as_without("without-clipping", *SHARDED, model=(*_HALF, "--clip-grad", "0"), flags=RELEASE),
    as_without("experts", *SHARDED, *_EXPERTS, model=_HALF, flags=RELEASE),
    as_without("float16", *SHARDED, model=FP16, flags=RELEASE),
    resumed(RELEASE, _HALF),
)
_NO_NEW_BUFFER = Gain("host_buffers", exactly=0)
# A rank of two holds 105,152 parameters of the small model.
SWAP_PROOFS = (
    as_without(
        "dp2-bytes", *SHARDED, flags=SWAP, gains=(_NO_NEW_BUFFER, Gain("host_bytes", exactly=12 * 105_152))
    ),
    *layouts(SWAP, (_NO_NEW_BUFFER,)),
    as_without("one-window", *SHARDED, flags=(*SWAP, "--swap-optimizer-times", "0")),
    as_without("float32", *SHARDED, model=(), flags=SWAP),
    resumed(SWAP),
)
VIRTUAL_PROOFS = (
    as_without(
        "dp2-bytes", *SHARDED, flags=VIRTUAL, gains=(_NO_NEW_BUFFER, Gain("host_bytes", exactly=8 * 105_152))
    ),
    *layouts(VIRTUAL, (_NO_NEW_BUFFER,)),
    as_without("split-masters", *SHARDED, flags=(*VIRTUAL, *REUSE)),
    as_without("partial-budget", *SHARDED, flags=("--virtual-optimizer", "0.0002")),
    resumed(VIRTUAL),
)
COMPRESS_PROOFS = (
    *layouts(COMPRESS, (Gain("optimizer_bytes", 0.95),)),
    as_without("split-masters", *SHARDED, flags=(*COMPRESS, *REUSE)),
    resumed(COMPRESS),
)
FRAGMENTATION_PROOFS = (
    as_without("dp2", *SHARDED, flags=("--memory-fragmentation",), gains=(Gain("step_peak_bytes", 1.0),)),
    as_without("pools", *SHARDED, flags=("--memory-fragmentation-pools",)),
    *fully_sharded(("--memory-fragmentation",)),
    resumed(("--memory-fragmentation",)),
)
_REPORT = ("--memory-report", "--memory-report-path", "runs/memory-report")
REPORT_PROOFS = (
    as_without("dp2", *SHARDED, flags=_REPORT, gains=(Gain("step_peak_bytes", 1.0),)),
    *fully_sharded(_REPORT),
    resumed(_REPORT),
)

"""Facts and command lines that the features of this package share, and the layouts they are proved in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from mindspeed_core.feature import Feature, Gain, Resume, Scenario

# Adam divides by the root of the second moment: with its usual epsilon the sign of a gradient that is zero
# but for rounding decides about a whole step.
STEADY = ("--adam-eps", "1e-3")
LLAMA = (*STEADY, "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear")
GQA = ("--group-query-attention", "--num-query-groups", "2")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
SHARDED = ("--use-distributed-optimizer",)
OVERLAPPED = (*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
LONG = (*STEADY, "--seq-length", "256", "--max-position-embeddings", "256")
RECOMPUTE = (
    *("--recompute-granularity", "full"),
    *("--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
ON_RANK = "seq_length * micro_batch_size / (tensor_model_parallel_size * context_parallel_size)"
"""Formula: tokens of a rank, where tensor parallelism divides what there is of each."""
PARTS = "(tensor_model_parallel_size if sequence_parallel else 1)"
"""Formula: ranks over which sequence parallelism divides tokens."""
SWITCHED = (False, True)
"""Values of a switch that are worth trying."""
LAYOUTS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("single", (), 1),
    ("tp2-sp", TP2, 2),
    ("pp2", PP2, 2),
)
"""Name, flags and world size of the layouts that most features are proved in."""


class KernelFeature(Feature):
    """Base of the features of this package: exact on every run, and no part of a checkpoint."""

    family = "kernels"
    level = 1
    deterministic = True
    affects_checkpoint = False
    fake_tensors: ClassVar[bool | None] = True


def across(
    flags: tuple[str, ...],
    baseline: tuple[str, ...],
    layouts: Iterable[tuple[str, tuple[str, ...], int]] = LAYOUTS,
    *,
    model: tuple[str, ...],
    **facts: Any,
) -> tuple[Scenario, ...]:
    """Return one scenario for each layout: ``model``, the layout's flags, and ``flags`` or ``baseline``.

    Args:
        flags: of the side that is proved.
        baseline: of the side it is compared with.
        layouts: name, flags and world size of each.
        model: flags of both sides.
        facts: further attributes of `Scenario`.
    """
    return tuple(
        Scenario(
            name,
            flags=(*model, *layout, *flags),
            baseline=(*model, *layout, *baseline),
            world_size=world_size,
            **facts,
        )
        for name, layout, world_size in layouts
    )


def resumed(
    flags: tuple[str, ...],
    model: tuple[str, ...],
    saved: tuple[str, ...] = OVERLAPPED,
    other: tuple[str, ...] = (*SHARDED, *TP2),
    tolerance: float = 1e-5,
) -> Scenario:
    """Return the scenario of a checkpoint that two ranks write, continued by two ranks in another layout.

    Args:
        flags: of the feature.
        model: flags of both layouts.
        saved: flags of the layout that writes the checkpoint.
        other: flags of the other layout.
        tolerance: in the other layout; in the first one every bit is the same.
    """
    return Scenario(
        "resume",
        flags=(*model, *saved, *flags),
        world_size=2,
        tolerance=tolerance,
        resume=Resume(flags=(*model, *other, *flags), world_size=2),
    )


def scenarios(
    flag: str,
    model: tuple[str, ...],
    baseline: tuple[str, ...] = (),
    gain: tuple[Gain, ...] = (),
    tolerance: float = 1e-5,
) -> tuple[Scenario, ...]:
    """Return scenarios on one process, with each kind of parallelism, in bfloat16, across a checkpoint."""
    sharded = (*LAYOUTS[1:], ("dp2-distributed-optimizer", SHARDED, 2))
    exact = (
        *across((flag,), baseline, LAYOUTS[:1], model=model, tolerance=tolerance, gains=gain),
        *across((flag,), baseline, sharded, model=model, tolerance=tolerance),
    )
    # bfloat16 has 8 bits: where one side rounds once and the other several times, they differ by percents.
    rounded = Scenario(
        "bf16",
        flags=(*model, "--bf16", flag),
        baseline=(*model, "--bf16", *baseline),
        tolerance=0.1,
        # On CPU it is computed in blocks of float32, whose few KiB show in so small a model.
        gains=tuple(replace(item, at_most=1.01) for item in gain),
    )
    return (*exact, rounded, resumed((flag,), model, tolerance=tolerance))

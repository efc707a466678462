"""Proofs of what the optimizer keeps: a model trains as with torch's AdamW, to the bit."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario

BF16 = ("--bf16", "--clip-grad", "0.5")
SHARDED = ("--use-distributed-optimizer",)
OVERLAPS = (*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
REUSE = ("--reuse-fp32-param",)


def as_without(
    name: str,
    *layout: str,
    flags: tuple[str, ...],
    ranks: int = 2,
    model: tuple[str, ...] = BF16,
    gains: tuple[Gain, ...] = (),
) -> Scenario:
    """Compare a training with a feature to the same one without it, on the same ranks, bit for bit.

    Args:
        name: of the scenario.
        layout: flags of both sides.
        flags: of the feature.
        ranks: processes.
        model: further flags of both sides.
        gains: what must be better.
    """
    return Scenario(
        name,
        flags=(*model, *layout, *flags),
        baseline=(*model, *layout),
        world_size=ranks,
        steps=4,
        tolerance=0.0,
        gains=gains,
    )


def layouts(flags: tuple[str, ...], whole: tuple[Gain, ...] = (), sharded: tuple[Gain, ...] = ()) -> tuple[Scenario, ...]:
    """Return proofs under the layouts that change what an optimizer holds."""
    return (
        as_without("dp2-distributed-optimizer", *SHARDED, flags=flags, gains=sharded),
        as_without("dp2", flags=flags, gains=whole),
        as_without("dp2-overlaps", *OVERLAPS, flags=flags, gains=sharded),
        as_without("tp2-sp", *TP2, flags=flags, gains=whole),
        as_without("pp2", *PP2, *SHARDED, flags=flags, gains=sharded),
    )


REUSE_PROOFS = (
    *layouts(REUSE, (Gain("optimizer_bytes", 0.84),), (Gain("optimizer_bytes", 0.84),)),
    Scenario(
        "resume",
        flags=(*BF16, *OVERLAPS, *REUSE),
        world_size=2,
        resume=Resume(flags=(*BF16, *SHARDED), world_size=1, with_feature=False),
    ),
)
BLOCK_PROOFS = (as_without("dp2-distributed-optimizer", *SHARDED, flags=REUSE),)

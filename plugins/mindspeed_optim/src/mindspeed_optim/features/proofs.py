"""Layouts that the proofs of several update rules share."""

from __future__ import annotations

from mindspeed_core.feature import Resume, Scenario

SHARDED = ("--use-distributed-optimizer",)
OVERLAPS = (*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
PLAIN = ("--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope")
"""A model without biases: the gradient of a key's bias is zero but for rounding."""
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--swiglu"),
    *("--moe-token-dispatcher-type", "alltoall"),
)
EP2 = ("--expert-model-parallel-size", "2")
BF16 = ("--bf16", "--clip-grad", "0.5")


def against_one_process(
    name: str,
    rule: tuple[str, ...],
    layout: tuple[str, ...],
    *,
    model: tuple[str, ...] = PLAIN,
    ranks: int = 2,
    tolerance: float = 1e-5,
) -> Scenario:
    """Train with a rule in a layout, and with the same rule in one process.

    Args:
        name: of the scenario.
        rule: flags of the update rule.
        layout: flags of the layout.
        model: flags of both sides.
        ranks: processes of the layout.
        tolerance: largest relative error.
    """
    return Scenario(
        name,
        flags=(*model, *rule, *layout),
        baseline=(*model, *rule),
        world_size=ranks,
        baseline_world_size=1,
        same_feature=True,
        tolerance=tolerance,
    )


def resumed(
    name: str,
    rule: tuple[str, ...],
    layout: tuple[str, ...],
    other: tuple[str, ...],
    *,
    model: tuple[str, ...] = PLAIN,
    tolerance: float = 1e-5,
) -> Scenario:
    """Continue a checkpoint bit for bit in its layout, and within a tolerance in another one.

    Args:
        name: of the scenario.
        rule: flags of the update rule.
        layout: flags of the layout that saves, on two ranks.
        other: flags of the other layout, on two ranks.
        model: flags of all sides.
        tolerance: of the other layout.
    """
    return Scenario(
        name,
        flags=(*model, *rule, *layout),
        world_size=2,
        tolerance=tolerance,
        resume=Resume(flags=(*model, *rule, *other), world_size=2),
    )

"""Layouts in which a rule that works element by element, or by blocks, trains as in one process."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_core.feature import Resume, Scenario
from mindspeed_optim.features.proofs import (
    EP2,
    EXPERTS,
    OVERLAPS,
    PLAIN,
    PP2,
    SHARDED,
    TP2,
    against_one_process,
)

INTERLEAVED = (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")
CP2 = ("--context-parallel-size", "2")
"""Of mindspeed-cp."""
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
TRAINED = ("losses", "gradients", "parameters", "learning rates")
"""What a training shows of its state."""
_UNTIED = (*PLAIN, "--untie-embeddings-and-output-weights")


def in_layouts(rule: tuple[str, ...], tolerance: float = 1e-5) -> tuple[Scenario, ...]:
    """Return the proofs of a rule in every layout, against one process.

    Args:
        rule: flags of the rule.
        tolerance: where gradients are added up in another order than in one process.
    """
    layouts = {
        "distributed-optimizer": (*SHARDED,),
        "tp2-sp": TP2,
        "pp2": PP2,
        "interleaved": INTERLEAVED,
        "cp2": (*CP2, *SHARDED),
    }
    return (
        *(against_one_process(name, rule, flags, tolerance=tolerance) for name, flags in layouts.items()),
        against_one_process("tp2-dp2", rule, (*TP2, *SHARDED), ranks=4, tolerance=tolerance),
        against_one_process("ep2", rule, (*EP2, *SHARDED), model=(*PLAIN, *EXPERTS), tolerance=tolerance),
        against_one_process("recompute", rule, FULL, ranks=1, tolerance=0.0),
    )


def exactly_as(rule: tuple[str, ...]) -> tuple[Scenario, ...]:
    """Return the proofs of pairs of layouts that train alike to the bit."""
    # The norm of gradients, by which they are clipped, is added up in another order.
    unclipped = (*PLAIN, "--clip-grad", "0")
    return (
        _as_other("dp2", rule, SHARDED, (), unclipped),
        _as_other("bf16", rule, SHARDED, (), (*unclipped, "--bf16")),
        _as_other("overlaps", rule, OVERLAPS, SHARDED, PLAIN),
    )


def in_fsdp2(rule: tuple[str, ...], tolerance: float = 1e-5) -> Scenario:
    """Return the proof of a rule under fully sharded data parallelism."""
    return against_one_process("fsdp2", rule, ("--use-torch-fsdp2",), model=_UNTIED, tolerance=tolerance)


def resumed_in(
    rule: tuple[str, ...], tolerance: float = 1e-5, compare: tuple[str, ...] = TRAINED
) -> tuple[Scenario, ...]:
    """Return the proofs that a run goes on from its checkpoint: exactly in its layout, and in two others.

    Args:
        rule: flags of the rule.
        tolerance: of the other layouts.
        compare: what is compared. Moments of fewer bits may be rounded otherwise in their last one.
    """
    common = (*PLAIN, *rule, *SHARDED)
    return tuple(
        Scenario(
            f"resume-{name}",
            flags=common,
            world_size=2,
            tolerance=tolerance,
            compare=compare,
            resume=Resume(flags=(*common, *layout), world_size=2),
        )
        for name, layout in (("tp2", TP2), ("pp2", PP2))
    )


def loaded_in(
    rule: tuple[str, ...], tolerance: float = 5e-4, warning: str = "", compare: tuple[str, ...] = ()
) -> tuple[Scenario, ...]:
    """Return the proofs that a checkpoint in bfloat16 holds the same state in another layout, and for Adam.

    Compared right after the load: what trains on differs by design, or by more than what was loaded.

    Args:
        rule: flags of the rule.
        tolerance: of the state in the other layout.
        warning: part of what loading into Adam says.
        compare: what is compared with Adam; by default parameters and all of the optimizer's state.
    """
    common = (*PLAIN, "--bf16", *SHARDED)
    return (
        Scenario(
            "load-tp2",
            flags=(*common, *rule),
            world_size=2,
            tolerance=tolerance,
            resume=Resume(flags=(*common, *rule, *TP2), world_size=2, steps=0),
        ),
        Scenario(
            "into-adam",
            flags=(*common, *rule),
            world_size=2,
            tolerance=0.0,
            compare=compare,
            resume=Resume(flags=common, world_size=1, steps=0, with_feature=False, warning=warning),
        ),
    )


def _as_other(
    name: str,
    rule: tuple[str, ...],
    layout: tuple[str, ...],
    other: tuple[str, ...],
    model: tuple[str, ...],
) -> Scenario:
    found = against_one_process(name, rule, layout, model=model, tolerance=0.0)
    return replace(found, baseline=(*found.baseline, *other), baseline_world_size=2)

"""Proofs of Muon: what it trains does not depend on the layout, and goes on from its checkpoints."""

from __future__ import annotations

from mindspeed_core.feature import Resume, Scenario
from mindspeed_optim.features.layout_proofs import CP2, FULL, INTERLEAVED
from mindspeed_optim.features.proofs import (
    EP2,
    EXPERTS,
    OVERLAPS,
    PLAIN,
    PP2,
    SHARDED,
    TP2,
    against_one_process,
    resumed,
)

# Products of bfloat16 numbers, the default, would hide what layouts do.
_RULE = (
    *("--optimizer", "muon", "--muon-fp32-matmul-prec", "high", "--muon-use-nesterov"),
    *("--muon-extra-scale-factor", "0.2"),
)
_WHOLE = (*_RULE, "--muon-tp-mode", "duplicated")
_SHARED = (*_RULE, "--muon-tp-mode", "distributed")
_GATED = (*PLAIN, "--swiglu")
# The norm of gradients, by which they are clipped, is summed in another order over shards.
_UNCLIPPED = ("--bf16", "--clip-grad", "0")
_ADAM = ("--optimizer", "adam")
_KEPT_NONE = "kept no exp_avg_sq"


def _alike(name: str, layout: tuple[str, ...], other: tuple[str, ...], model: tuple[str, ...]) -> Scenario:
    """Compare two layouts on two ranks, bit for bit."""
    return Scenario(
        name,
        flags=(*model, *_RULE, *layout),
        baseline=(*model, *_RULE, *other),
        world_size=2,
        same_feature=True,
        tolerance=0.0,
    )


MUON_PROOFS = (
    against_one_process("dp2-distributed-optimizer", _RULE, SHARDED),
    against_one_process("tp2-sp-duplicated", _WHOLE, TP2),
    against_one_process("tp2-sp-distributed", _SHARED, TP2),
    against_one_process("pp2", _RULE, (*PP2, *SHARDED)),
    against_one_process("tp2-dp2", _WHOLE, (*TP2, *SHARDED), ranks=4),
    against_one_process("interleaved", _RULE, (*INTERLEAVED, *SHARDED)),
    against_one_process("cp2", _RULE, (*CP2, *SHARDED)),
    against_one_process("recompute", _RULE, FULL, ranks=1, tolerance=0.0),
    against_one_process("ep2", _RULE, (*SHARDED, *EP2), model=(*PLAIN, *EXPERTS)),
    # Experts have a tensor-parallel group of their own.
    against_one_process("tp2-ep2", _WHOLE, (*TP2, *SHARDED, *EP2), model=(*PLAIN, *EXPERTS), ranks=4),
    against_one_process(
        "tp2-gated-apart", (*_WHOLE, "--muon-split-gated"), (*TP2, *SHARDED), model=_GATED, ranks=2
    ),
    _alike("dp2-overlaps", OVERLAPS, SHARDED, PLAIN),
    _alike("dp2-bf16", SHARDED, (), (*PLAIN, *_UNCLIPPED)),
    resumed("resume-tp2", _WHOLE, SHARDED, (*TP2, *SHARDED)),
    resumed("resume-pp2", _WHOLE, SHARDED, (*PP2, *SHARDED)),
    Scenario(
        "into-adam",
        flags=(*PLAIN, *_RULE, *SHARDED),
        world_size=2,
        tolerance=0.0,
        resume=Resume(
            flags=(*PLAIN, *_ADAM, *TP2, *SHARDED),
            world_size=2,
            steps=0,
            with_feature=False,
            warning=_KEPT_NONE,
        ),
    ),
)

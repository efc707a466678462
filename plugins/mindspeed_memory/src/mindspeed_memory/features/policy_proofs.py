"""Proofs of policies: a model trains as without, to the bit, and a plan holds its budget.

Steps enough for measuring, planning and the first step of the plan are compared.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed_core.feature import Gain, Scenario
from mindspeed_memory.features.proofs import (
    EXPERTS,
    FUSED_LLAMA,
    INTERLEAVED,
    MODEL,
    PP2,
    TP2,
    as_without,
    in_layouts,
)

_MEASURING, _COMPARED = 7, 9
_STEPS = ("--adaptive-recompute-profiling-step", str(_MEASURING))
_LONG = ("--seq-length", "256", "--max-position-embeddings", "256")
_SHARE = "--adaptive-recompute-share"
_RECOMPUTE = ("--adaptive-recompute-device-swap", *_STEPS)
_MEMORY = ("--adaptive-memory-optimization", *_STEPS, "--swap-min-bytes", "1024")


def _holds(*, less: float = 1.0) -> tuple[Gain, ...]:
    """Return the gains of a plan: nothing beyond the budget, a measured one, and less than without."""
    return (
        Gain("planned bytes beyond the budget", value_at_most=0),
        Gain("bytes of the plan's first step beyond the budget", value_at_most=0),
        Gain("peak_bytes", less),
    )


def _longer(scenarios: tuple[Scenario, ...]) -> tuple[Scenario, ...]:
    return tuple(replace(scenario, steps=_COMPARED) for scenario in scenarios)


def _proofs(flags: tuple[str, ...]) -> tuple[Scenario, ...]:
    long, longer_llama = (*MODEL, *_LONG), (*FUSED_LLAMA, *_LONG)
    return _longer(
        (
            as_without("budget", (*flags, _SHARE, "0.25"), model=longer_llama, gains=_holds(less=0.8)),
            as_without("biases", (*flags, _SHARE, "0.5"), model=long, gains=_holds()),
            as_without("tp2-tight", (*flags, _SHARE, "0"), *TP2, ranks=2, model=longer_llama, gains=_holds()),
            as_without(
                "pp2-tight", (*flags, _SHARE, "0.1"), *PP2, ranks=2, model=longer_llama, gains=_holds()
            ),
            as_without(
                "interleaved-tight",
                (*flags, _SHARE, "0.1"),
                *INTERLEAVED,
                ranks=2,
                model=longer_llama,
                gains=_holds(),
            ),
            as_without("experts", (*flags, _SHARE, "0.5"), model=(*EXPERTS, *_LONG), gains=_holds()),
            *in_layouts((*flags, _SHARE, "0.5"), model=longer_llama),
        )
    )


RECOMPUTE_PROOFS = _proofs(_RECOMPUTE)
MEMORY_PROOFS = _proofs(_MEMORY)
_SMART = ("--smart-swap", "--swap-min-bytes", "1024")
_SMART_STEPS = 5
SMART_PROOFS = tuple(
    replace(scenario, steps=_SMART_STEPS)
    for scenario in (
        as_without(
            "traced",
            _SMART,
            model=(*FUSED_LLAMA, *_LONG),
            gains=(
                Gain("forward_bytes", 0.9),
                Gain("peak_bytes", 1.0),
                Gain("swapped bytes"),
                Gain("host_buffers", less=0),
            ),
        ),
        as_without("biases", _SMART),
        as_without("experts", _SMART, model=EXPERTS),
        *in_layouts(_SMART),
    )
)

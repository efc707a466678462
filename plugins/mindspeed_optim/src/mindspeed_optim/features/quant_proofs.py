"""Proofs of moments in fewer bits: a run trains alike wherever its parameters lie."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_core.feature import Gain, Scenario
from mindspeed_optim.features.layout_proofs import exactly_as, in_layouts, loaded_in, resumed_in
from mindspeed_optim.features.proofs import PLAIN, SHARDED
from mindspeed_optim.quantized_formats import BF16, FP8

_FP8, _BF16 = ("--quant-states", FP8), ("--quant-states", BF16)


def _bytes(name: str, rule: tuple[str, ...], ratio: float) -> Scenario:
    return Scenario(
        name,
        flags=(*PLAIN, *SHARDED, *rule),
        baseline=(*PLAIN, *SHARDED),
        world_size=2,
        steps=1,
        compare=("learning rates",),
        gains=(Gain("optimizer_bytes", at_most=ratio),),
    )


QUANT_PROOFS = (
    *in_layouts(_FP8, tolerance=1e-2),
    *resumed_in(_FP8, tolerance=1e-2),
    *loaded_in(_FP8, tolerance=0.15),
    # Two ranks that share a block have two scales of it, but in bfloat16 there are no blocks.
    *(replace(scenario, name=f"bfloat16-{scenario.name}") for scenario in exactly_as(_BF16)),
    _bytes("bytes", _FP8, 0.253),
    _bytes("bytes-bf16", _BF16, 0.501),
)

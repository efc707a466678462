"""Proofs of averaged weights: weights train as with the fused kernel, and averages alike in every layout."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_core.feature import Scenario
from mindspeed_optim.features.layout_proofs import exactly_as, in_fsdp2, in_layouts, loaded_in, resumed_in
from mindspeed_optim.features.proofs import PLAIN, SHARDED

_EMA = ("--optimizer-selection", "fused_ema_adamw", "--ema-decay", "0.5")
_COMPARED = ("losses", "gradients", "parameters", "optimizer state")


def _with_state(scenario: Scenario) -> Scenario:
    return replace(scenario, compare=_COMPARED)


EMA_PROOFS = (
    # The state of an optimizer is saved in one form with the distributed optimizer, and in another without.
    *map(_with_state, in_layouts((*_EMA, *SHARDED))),
    *exactly_as(_EMA),
    in_fsdp2(_EMA),
    *resumed_in(_EMA, compare=()),
    *loaded_in(_EMA, compare=("parameters",)),
    Scenario(
        "as-adam",
        flags=(*PLAIN, *SHARDED, *_EMA),
        baseline=(*PLAIN, *SHARDED),
        world_size=2,
    ),
)

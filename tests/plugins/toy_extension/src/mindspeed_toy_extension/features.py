"""A feature that wraps a stage published by another plugin."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from mindspeed_core.feature import Feature, Flag, Requirement, hookimpl

if TYPE_CHECKING:
    import torch

    from mindspeed_core.run import Run


class WeightFactor(Feature):
    """Multiplies the weights that the active rule gives."""

    name = "toy-weight-factor"
    family = "toys"
    summary = "multiplies the weight of every token"
    flags = (Flag("--toy-weight-factor", type=float, help="The factor."),)
    requires = (Requirement(feature="toy-token-weights", reason="there are no weights to multiply"),)

    @hookimpl(wrapper=True)
    def toy_token_weights(self, run: Run) -> Generator[None, torch.Tensor, torch.Tensor]:
        return (yield) * run.args.toy_weight_factor


DECLARATIONS = (WeightFactor,)

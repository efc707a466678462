"""CAdam, MindSpeed's ``--optimizer cadam``: the sign of one moment, which is kept in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mindspeed_core import DescribedOptimizer
from mindspeed_optim.float_blocks import FLOAT16, BlockFloats

_FIRST = "exp_avg"
_KEPT = "moment"


class CAdam(DescribedOptimizer):
    """Move every number by the learning rate, in the direction of its average gradient.

    ``p = p (1 - lr weight_decay) - lr sign(m)`` with ``m = beta1 m + (1 - beta1) g``: there is no second
    moment and no correction of bias. It is Lion (https://arxiv.org/abs/2302.06675) with one factor in the
    place of two.

    Between updates the moment has 16 bits a number, and a power of two for every block of 128. Its
    description in float32 is exact.
    """

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a moment of zeros, in blocks of the model's parameter."""
        start = self.part_of(parameter).start
        return {_KEPT: BlockFloats.zeros(parameter.numel(), parameter.device, FLOAT16, start)}

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Update a parameter chunk by chunk, so that the float32 moment exists of one chunk at a time."""
        rate, beta = group["lr"], group["betas"][0]
        parameter.mul_(1 - rate * group["weight_decay"])
        flat, gradient, kept = parameter.view(-1), gradient.reshape(-1), state[_KEPT]
        for start, stop in kept.ranges():
            moment = kept.read(start, stop).lerp_(gradient[start:stop], 1 - beta)
            kept.write(start, stop, moment)
            flat[start:stop].sub_(moment.sign_(), alpha=rate)

    def describe(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Return the moment in float32; the second one is saved as zeros."""
        return {_FIRST: state[_KEPT].whole().view(parameter.shape)}

    def restore(self, parameter: torch.Tensor, described: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Encode the first moment, whoever it is of; the second one has no use."""
        state = self.new_state(parameter)
        state[_KEPT].fill(described[_FIRST].reshape(-1))
        return state

"""A moving average of the parameters, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mindspeed_core.run import Run

Average = dict[torch.nn.Parameter, torch.Tensor]


def copies(run: Run) -> Average:
    """Return the average at the start of training, by parameter."""
    return {
        parameter: parameter.detach().float().clone()
        for chunk in run.model
        for parameter in chunk.parameters()
    }


@torch.no_grad()
def update(average: Average, run: Run, decay: float) -> None:
    """Move the average towards the updated parameters. Collective over data-parallel ranks."""
    run.complete_parameters()
    for parameter, kept in average.items():
        kept.lerp_(parameter.float(), 1 - decay)

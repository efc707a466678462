"""Parameters that several ranks of the grid hold and each learns from its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_core.session import current

_GROUP = "mindspeed_tp_summed_over"


def learned_in_parts(parameter: Any, group: str, *, counted: bool) -> None:
    """Mark a parameter whose gradient is a part of the one that the ranks of a group have together.

    Args:
        parameter: the parameter.
        group: name of the group.
        counted: whether this rank's copy counts in norms of all gradients.
    """
    setattr(parameter, _GROUP, group)
    parameter.tensor_model_parallel = counted
    parameter.partition_dim, parameter.partition_stride = 0, 1


def sum_parts(model: Sequence[torch.nn.Module]) -> None:
    """Sum the gradients of all marked parameters, in one collective for each group and dtype."""
    waiting: dict[tuple[str, torch.dtype], list[Tensor]] = {}
    for chunk in model:
        for parameter in chunk.parameters():
            name = getattr(parameter, _GROUP, None)
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if name is not None and gradient is not None:
                waiting.setdefault((name, gradient.dtype), []).append(gradient)
    for (name, _), gradients in waiting.items():
        group = current().groups[name]
        if group.size() == 1:
            continue
        joined = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(joined, group=group)
        for gradient, summed in zip(gradients, joined.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

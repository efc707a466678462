"""z-loss: ``w · log²Z`` beside each token's loss, where ``Z`` sums the exponentials of its logits (PaLM).

``Z`` runs over the vocabulary of all tensor-parallel ranks, its padding included, as the loss does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from mindspeed_core.errors import SessionError

NAME = "z loss"
"""Under which it is reported, without its weight."""


@dataclass
class Waiting:
    """The values of the micro-batch whose loss comes next, ``[b, s]``; None where there are none."""

    values: Tensor | None = None


def squared_log_sums(logits: Tensor, group: Any) -> Tensor:
    """Return ``log²Z`` of each token.

    Args:
        logits: ``[s, b, v / t]``, in any dtype; unchanged.
        group: the ranks that hold the vocabulary together.

    Returns:
        ``[b, s]`` float32, with gradient.
    """
    wide = logits.float()
    top = wide.detach().amax(dim=-1)
    if group.size() > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    total = (wide - top.unsqueeze(-1)).exp().sum(dim=-1)
    if group.size() > 1:
        # Each rank's logits have the gradient of the whole sum.
        total = reduce_from_tensor_model_parallel_region(total, group=group)
    return (total.log() + top).square().transpose(0, 1).contiguous()


def keep(waiting: Waiting, values: Tensor, *, training: bool) -> None:
    """Keep the values of a micro-batch until its loss is known.

    Raises:
        SessionError: nobody took those before.
    """
    if training and waiting.values is not None:
        raise SessionError(
            "--z-loss-weight: the loss of the micro-batch before did not pass the stage compute_loss, so "
            "its z-loss was not trained; pass the loss through session.loss"
        )
    waiting.values = values


def add(waiting: Waiting, loss: Any, mask: Tensor | None, weight: float) -> Any:
    """Return the loss of a micro-batch with its z-loss.

    Args:
        waiting: the values of its tokens.
        loss: a `mindspeed_core.run.Loss`.
        mask: ``[b, s]``, of tokens that count; None where all do.
        weight: of the z-loss.
    """
    values, waiting.values = waiting.values, None
    if values is None:
        return loss
    counted = torch.ones_like(values) if mask is None else mask.reshape(values.shape).float()
    return loss.plus(NAME, (values * counted).sum(), counted.sum(), weight=weight)

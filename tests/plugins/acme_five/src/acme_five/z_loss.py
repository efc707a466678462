"""The z-loss of PaLM (arXiv 2204.02311): the square of the logarithm of softmax's normalizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

if TYPE_CHECKING:
    from mindspeed_core.run import Batch, Loss


@dataclass
class Squares:
    """The squares of the micro-batch in forward, ``[b, s]`` float32."""

    of_tokens: torch.Tensor | None = None


def squared_log_sums(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the square of ``log(sum(exp(logits)))`` over the vocabulary, ``[b, s]`` float32.

    Args:
        logits: ``[s, b, v / tp]``.
        group: the ranks that hold the vocabulary together.
    """
    logits = logits.float()
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    # Summed forward; backward each rank's part gets the gradient of the whole.
    total = reduce_from_tensor_model_parallel_region((logits - largest.unsqueeze(-1)).exp().sum(-1))
    return (largest + total.log()).square().transpose(0, 1)


def with_z_loss(loss: Loss, batch: Batch, squares: Squares, weight: float) -> Loss:
    """Add the mean of the squares over the tokens that count."""
    assert batch.loss_mask is not None
    assert squares.of_tokens is not None
    total = (squares.of_tokens * batch.loss_mask).sum()
    squares.of_tokens = None
    return loss.plus("z loss", total, batch.loss_mask.sum(), weight=weight)

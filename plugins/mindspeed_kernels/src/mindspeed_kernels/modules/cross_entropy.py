"""Losses of tokens from logits: fused, or as megatron-core does without assignments by index."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_kernels.ops import cross_entropy


def token_losses(logits: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
    """Return losses ``[b, s]`` float32 of logits ``[s, b, v/tp]`` for labels ``[b, s]``."""
    losses = cross_entropy(logits, labels.t().contiguous(), group if group.size() > 1 else None)
    return losses.t().contiguous()


def calculate_predicted_logits(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    logits_max: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute what megatron-core's function of the same name does, by selection instead of assignment.

    Assignments by index are slow on NPUs.

    Selection, not multiplication with the mask: a logit may be infinite (a padded vocabulary), and zero times
    infinity is no number.

    Args:
        vocab_parallel_logits: this rank's logits ``[s, b, v/tp]`` float32, overwritten.
        target: ``[s, b]`` int64, ids of the whole vocabulary.
        logits_max: ``[s, b]``, maxima over all ranks.
        vocab_start_index: first id of this rank.
        vocab_end_index: last id of this rank plus one.

    Returns:
        ``(target_mask [s, b], masked_target_1d [s b], predicted_logits [s, b], sums of exponentials [s, b],
        exponentials [s, b, v/tp])``.
    """
    vocab_parallel_logits -= logits_max.unsqueeze(dim=-1)
    target_mask = (target < vocab_start_index) | (target >= vocab_end_index)
    masked_target = torch.where(target_mask, 0, target - vocab_start_index)
    own = vocab_parallel_logits.gather(-1, masked_target.unsqueeze(-1)).squeeze(-1)
    predicted_logits = torch.where(target_mask, torch.zeros_like(own), own)
    exp_logits = vocab_parallel_logits.exp_()
    return target_mask, masked_target.view(-1), predicted_logits, exp_logits.sum(dim=-1), exp_logits

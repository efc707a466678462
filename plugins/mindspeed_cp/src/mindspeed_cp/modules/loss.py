"""The loss of a sequence that is split over ranks: exact whatever tokens count on which rank.

megatron-core divides a rank's loss by its number of tokens and averages gradients over data-parallel and
context-parallel ranks. With the sum times the number of ranks, and the tokens of all ranks, that is the mean
over the sequence. With ``--calculate-per-token-loss`` gradients are summed and divided by the tokens of all
ranks together, which is right already. A loss that is a mean already counts as much as its rank's tokens;
megatron-core multiplies it by the number of ranks itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mindspeed_core.errors import UserError
from mindspeed_core.run import Loss

if TYPE_CHECKING:
    from mindspeed_core.run import Batch, Run


def over_the_sequence(run: Run, loss: Loss, batch: Batch) -> Loss:
    """Scale the loss of one rank's part to its share of the whole sequence's.

    Args:
        run: the run; its context-parallel group is summed over.
        loss: of this rank's tokens.
        batch: this rank's part; of a mean, its loss mask says over how many tokens.

    Raises:
        UserError: a mean over unknown tokens.
    """
    if loss.averaged:
        return loss.scaled(_share(run, batch))
    if run.config.calculate_per_token_loss:
        return loss
    tokens = loss.num_tokens.detach().clone()
    dist.all_reduce(tokens, group=run.pg.cp)
    return loss.scaled(run.pg.cp.size(), tokens)


def _share(run: Run, batch: Batch) -> torch.Tensor:
    """Return the share of the sequence's counted tokens that are here, float32 scalar in 0..1."""
    if batch.loss_mask is None:
        raise UserError(
            "the loss function returns a mean, and the batch has no loss_mask that says over which tokens; "
            "return the sum, the number of tokens and the report"
        )
    here = batch.loss_mask.detach().float().sum()
    everywhere = here.clone()
    dist.all_reduce(everywhere, group=run.pg.cp)
    return here / everywhere.clamp(min=1.0)

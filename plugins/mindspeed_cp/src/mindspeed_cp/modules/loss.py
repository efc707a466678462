"""The loss of a sequence that is split over ranks: exact whatever tokens count on which rank.

megatron-core divides a rank's loss by its number of tokens and averages gradients over data-parallel and
context-parallel ranks. With the sum times the number of ranks, and the tokens of all ranks, that is the mean
over the sequence. With ``--calculate-per-token-loss`` gradients are summed and divided by the tokens of all
ranks together, which is right already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from mindspeed_core.run import Loss

if TYPE_CHECKING:
    from mindspeed_core.run import Run


def over_the_sequence(run: Run, loss: Loss) -> Loss:
    """The loss of one rank's part as a share of the whole sequence's.

    Args:
        run: the run; its context-parallel group is summed over.
        loss: of this rank's tokens.
    """
    if run.config.calculate_per_token_loss:
        return loss
    tokens = loss.num_tokens.detach().clone()
    dist.all_reduce(tokens, group=run.pg.cp)
    return Loss(loss.total * run.pg.cp.size(), tokens, loss.report)

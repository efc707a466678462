"""The gradient norm of one micro-batch, from what ranks have accumulated in the middle of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from mindspeed_core.run import Run


def micro_batch_squared_norm(run: Run, share: torch.Tensor, samples: int) -> float:
    """Mean squared norm of the gradient of one micro-batch over all data-parallel ranks; collective.

    Args:
        run: the run in progress.
        share: what ``squared_norm_share`` gave on this rank.
        samples: samples of the whole step.
    """
    if run.dist.world_size > 1:
        dist.all_reduce(share)
    replicas = run.pg.dp.size()
    # The schedule divides each micro-batch's loss by their number.
    microbatches = samples // (run.args.micro_batch_size * replicas)
    return float(share) * microbatches**2 / replicas

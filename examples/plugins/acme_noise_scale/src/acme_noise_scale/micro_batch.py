"""The gradient norm of one micro-batch, read from megatron-core's buffers in the middle of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

if TYPE_CHECKING:
    from mindspeed_core.run import Run


def local_squared_norm(run: Run) -> torch.Tensor:
    """Squared norm of what this rank has accumulated so far, without the loss scale; a scalar, float64.

    A parameter that several tensor-parallel ranks hold counts on the first of them only.
    """
    total = torch.zeros((), dtype=torch.float64, device=run.dist.device)
    for chunk in run.model:
        for parameter in chunk.parameters():
            if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
                total += parameter.main_grad.double().square().sum()
    assert run.optimizer is not None
    return total / run.optimizer.get_loss_scale().double().reshape(()) ** 2


def micro_batch_squared_norm(run: Run, local: torch.Tensor, samples: int) -> float:
    """Mean squared norm of the gradient of one micro-batch over all data-parallel ranks; collective.

    Args:
        run: the run in progress.
        local: what `local_squared_norm` gave on this rank.
        samples: samples of the whole step.
    """
    if run.dist.world_size > 1:
        dist.all_reduce(local)
    replicas = run.pg.dp.size()
    # The schedule divides each micro-batch's loss by their number.
    microbatches = samples // (run.args.micro_batch_size * replicas)
    return float(local) * microbatches**2 / replicas

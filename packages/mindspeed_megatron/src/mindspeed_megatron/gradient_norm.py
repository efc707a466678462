"""The norm of all gradients of a model, whatever its layout, without waiting for the device.

Squares are summed where the gradients are, and one reduction over all ranks makes the sum: every rank
contributes its share, so that an element that several ranks hold counts once, as megatron-core counts it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch.distributed.tensor import DTensor, Replicate

from mindspeed_core.errors import SessionError
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.run import Run

Weighted = Iterator[tuple[torch.Tensor, float]]


def gradient_norm(run: Run) -> torch.Tensor:
    """Return the norm of the finished gradients over all ranks; collective over the whole world.

    It is the norm that megatron-core clips by, the loss scale divided out. Call it between the last reduction
    of a step and the update: before the ``yield`` of ``optimizer_step``, or after that of
    ``finalize_gradients``. Nothing waits for the device; ``float(norm)`` does, once::

        @hookimpl(wrapper=True)
        def optimizer_step(self, run):
            run.metrics.add("gradient norm", gradient_norm(run))
            return (yield)

    Returns:
        A scalar, float32, on the run's device, the same on every rank.
    """
    total = squared_norm_share(run)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


def squared_norm_share(run: Run, *, finished: bool = True) -> torch.Tensor:
    """Return this rank's share of the squared norm: the sum over all ranks is the whole. Not collective.

    Args:
        run: the run in progress.
        finished: gradients are reduced. Otherwise they are what every data-parallel rank has accumulated from
            its own micro-batches so far, each rank's counts, and the sum is over their squared norms.

    Returns:
        A scalar, float32, on the run's device, without the loss scale.

    Raises:
        SessionError: gradients that are not finished do not exist, since fully sharded data parallelism
            reduces each of them when it is made.
    """
    found = [pair for chunk in run.model for pair in _gradients(run, chunk, finished)]
    total = torch.zeros((), dtype=torch.float32, device=run.dist.device)
    if found:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient, _ in found]
        weights = torch.tensor([weight for _, weight in found], dtype=torch.float32)
        total = torch.dot(torch.stack(norms).square(), weights.to(total.device, non_blocking=True))
    if run.optimizer is not None and hasattr(run.optimizer, "get_loss_scale"):
        total = total / run.optimizer.get_loss_scale().float().reshape(()) ** 2
    return total


def _gradients(run: Run, chunk: Any, finished: bool) -> Weighted:
    """Yield this rank's gradients of a chunk, each with the share of it that counts here."""
    options: Any = getattr(chunk, "ddp_config", None)
    if hasattr(chunk, "bucket_groups"):
        if finished and options.use_distributed_optimizer:
            yield from _sharded_by_optimizer(chunk)
            return
    elif options is not None and not finished:
        raise SessionError(
            f"{type(chunk).__name__} reduces gradients as they are made; what a rank has accumulated by "
            "itself is known without --use-torch-fsdp2 and --use-megatron-fsdp only"
        )
    whole = getattr(options, "data_parallel_sharding_strategy", None) == "no_shard"
    for parameter in unwrap(chunk).parameters():
        gradient = getattr(parameter, "main_grad", None)
        if isinstance(parameter, DTensor) or gradient is None:
            gradient = parameter.grad
        if gradient is None or not _counts(parameter):
            continue
        if not finished:
            yield gradient, 1.0
        elif isinstance(gradient, DTensor) and not (whole and options.use_megatron_fsdp):
            mesh = gradient.device_mesh
            copies = [mesh.size(dim) for dim, kind in enumerate(gradient.placements) if kind == Replicate()]
            yield gradient._local_tensor, 1.0 / math.prod(copies)
        else:
            local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
            yield local, 1.0 / _replicas(run, parameter)


def _sharded_by_optimizer(chunk: Any) -> Weighted:
    """Yield what the distributed optimizer has reduced on this rank: a part of every bucket."""
    weight = 1.0 / chunk.ddp_config.num_distributed_optimizer_instances
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            data = bucket.grad_data
            length = data.numel() // ranks.size()
            first = ranks.rank() * length
            for parameter in bucket.params_list:
                # Parameters start at padded offsets, which the address of the view tells.
                start = (parameter.main_grad.data_ptr() - data.data_ptr()) // data.element_size()
                begin, end = max(start, first), min(start + parameter.numel(), first + length)
                if begin < end and _counts(parameter):
                    yield data[begin:end], weight


def _counts(parameter: Any) -> bool:
    """Return whether this rank's copy is the one that megatron-core counts."""
    return bool(param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter))


def _replicas(run: Run, parameter: Any) -> int:
    group = run.pg.dp_cp if getattr(parameter, "allreduce", True) else run.pg.expt_dp
    return int(group.size())

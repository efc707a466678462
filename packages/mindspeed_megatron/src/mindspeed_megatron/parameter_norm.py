"""The norm of all parameters of a model, whatever its layout: one reduction over all ranks.

Every rank contributes its share, so that an element that several ranks hold counts once, as in Megatron-LM's
``calc_params_l2_norm``: with ``--bf16`` the float32 main parameters count, elsewhere the model's own.
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

from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.run import Run


def parameter_norm(run: Run) -> torch.Tensor:
    """Return the L2 norm of the model's parameters over all ranks; collective over the whole world.

    Parameters have to be complete (`Run.complete_parameters`): a gather that is under way changes them.

    Returns:
        A scalar, float32, on the run's device, the same on every rank.
    """
    total = torch.zeros((), dtype=torch.float32, device=run.dist.device)
    for chunk in run.model:
        for values, share in _values(run, chunk):
            total += torch.linalg.vector_norm(values.detach(), dtype=torch.float32).square() * share
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


def _values(run: Run, chunk: Any) -> Iterator[tuple[torch.Tensor, float]]:
    """Yield the parameters of a chunk that count on this rank, each with the share of it that does."""
    for parameter in unwrap(chunk).parameters():
        if not param_is_not_shared(parameter) or not param_is_not_tensor_parallel_duplicate(parameter):
            continue
        group = run.pg.dp_cp if getattr(parameter, "allreduce", True) else run.pg.expt_dp
        main = getattr(parameter, "main_param", None) if run.args.bf16 else None
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            copies = [mesh.size(dim) for dim, kind in enumerate(parameter.placements) if kind == Replicate()]
            yield parameter._local_tensor, 1.0 / math.prod(copies)
        elif run.args.bf16 and getattr(parameter, "main_param_sharded", False):
            if main is not None:
                # Each instance of the distributed optimizer holds every element once.
                yield main, 1.0 / run.args.num_distributed_optimizer_instances
        else:
            yield parameter if main is None else main, 1.0 / group.size()

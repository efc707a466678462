"""``coc_ops``: matrix products with communication that write into tensors of the caller.

The names and the argument order are those of the operator library they replace. The group is an argument
(None is megatron-core's tensor-parallel group where there is one, else all ranks). Nothing here is followed
by autograd; `overlapped_matmul` has the differentiable operators.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_kernels.absent import ABSENT, absence
from mindspeed_kernels.ops.overlapped_matmul import (
    Group,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from mindspeed_kernels.ops.process_groups import process_group


class CoCOperations:
    """The operators; ``coc_ops`` is the one instance that callers use."""

    def __getattr__(self, name: str) -> object:
        """Say of a method that is not here why."""
        raise AttributeError(absence(name) if name in ABSENT else f"coc_ops has no attribute {name!r}")

    def matmul_all_reduce(
        self, input1: Tensor, input2: Tensor, output: Tensor, bias: Tensor | None = None, group: Group = None
    ) -> Tensor:
        """Return ``output = sum over ranks of input1 [m, k] · input2 [k, n], + bias [1, n]``."""
        with torch.no_grad():
            return output.copy_(matmul_all_reduce(input1, input2, bias, _group(group)))

    def all_gather_matmul(
        self, input1: Tensor, input2: Tensor, output: Tensor, bias: Tensor | None = None, group: Group = None
    ) -> Tensor:
        """Return ``output [m, n] = gather(input1 [m / w, k]) · input2 [k, n] + bias``."""
        with torch.no_grad():
            return output.copy_(all_gather_matmul(input1, input2, bias, _group(group))[0])

    def all_gather_matmul_v2(
        self,
        input1: Tensor,
        input2: Tensor,
        output: Tensor,
        comm_output: Tensor,
        bias: Tensor | None = None,
        group: Group = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute `all_gather_matmul`, write the gathered rows to ``comm_output [m, k]``, return both."""
        with torch.no_grad():
            result, whole = all_gather_matmul(input1, input2, bias, _group(group))
            return output.copy_(result), comm_output.copy_(whole)

    def matmul_reduce_scatter(
        self, input1: Tensor, input2: Tensor, output: Tensor, bias: Tensor | None = None, group: Group = None
    ) -> Tensor:
        """Return ``output [m / w, n]``: this rank's rows of the summed product, ``+ bias``."""
        with torch.no_grad():
            return output.copy_(matmul_reduce_scatter(input1, input2, bias, _group(group)))

    def pure_matmul(
        self, input1: Tensor, input2: Tensor, output: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return ``output = input1 · input2 + bias``, without communication."""
        with torch.no_grad():
            torch.mm(input1, input2, out=output)
            return output if bias is None else output.add_(bias)


def _group(group: Group) -> ProcessGroup:
    if group is None and dist.is_initialized():
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            return parallel_state.get_tensor_model_parallel_group()
    return process_group(group, "group")


coc_ops = CoCOperations()


def __getattr__(name: str) -> object:
    """Say of a class that is not here why."""
    if name in ABSENT:
        raise ImportError(absence(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

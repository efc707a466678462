"""Attention on CUDA by the flash kernel that torch brings, forward and backward with a given log-sum.

Whole rectangles, triangles and bands, in float16 and bfloat16; other tasks are left to matrix products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_cp.engine.kernels.contract import BackwardBlock, BlockKernel, Case
from mindspeed_cp.engine.kernels.products import padded
from mindspeed_cp.engine.kernels.rows import band, is_band
from mindspeed_cp.engine.masks import CAUSAL, MASKED
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import Task
from mindspeed_megatron.planned_kernels import kernels_for

_WIDEST = 256
_UNIT = 8
"""The kernel wants widths that are multiples of this."""


class CudaFlashKernel(BlockKernel):
    """torch's flash kernel: grouped heads without repeating keys, windows without a mask."""

    name = "cuda-flash"
    devices = ("cuda",)

    def missing(self) -> str:
        """See `BlockKernel.missing`."""
        # A plan of this kernel runs its shape functions alone.
        planned = kernels_for("cpu") in self.devices
        built = planned or torch.backends.cuda.is_flash_attention_available()
        return "" if built else "this torch was built without the flash kernel"

    def refusal(self, case: Case) -> str:
        """See `BlockKernel.refusal`."""
        if case.dtype not in (torch.float16, torch.bfloat16):
            return "it computes float16 and bfloat16"
        if case.dropout or case.bias:
            return "it drops no weights by position and adds no bias"
        if case.kind == MASKED and not case.band:
            return "it takes no mask"
        if case.width > _WIDEST or case.value_width > case.width:
            return f"widths are at most {_WIDEST}, values not wider than queries"
        return ""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, task: Task, scores: Scores) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        width = _padded_width(q)
        output, logsum, *_ = torch.ops.aten._flash_attention_forward(
            *(padded(tensor, width).transpose(1, 2) for tensor in (q, k, v)),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            task.kind == CAUSAL,
            False,
            scale=scores.scale,
            **_window(task, scores),
        )
        return _unpadded(output, v.shape[-1]), logsum.narrow(-1, 0, q.shape[2])

    def backward(self, block: BackwardBlock) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.backward`."""
        outer, q, k, v, output, logsum, task, scores = block
        width = _padded_width(q)
        # Random numbers belong to dropout, which is not used.
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(padded(tensor.to(q.dtype), width).transpose(1, 2) for tensor in (outer, q, k, v, output)),
            # A part of all rows has their strides, which the kernel does not ask for.
            logsum.clone(memory_format=torch.contiguous_format),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            task.kind == CAUSAL,
            unused,
            unused,
            scale=scores.scale,
            **_window(task, scores),
        )
        return (_unpadded(dq, q.shape[-1]), _unpadded(dk, q.shape[-1]), _unpadded(dv, v.shape[-1]))


def _padded_width(q: Tensor) -> int:
    return -(-q.shape[-1] // _UNIT) * _UNIT


def _unpadded(tensor: Tensor, width: int) -> Tensor:
    """Return ``[b, n, s, d]`` of the kernel's result, without padding."""
    return tensor.transpose(1, 2).narrow(-1, 0, width)


def _window(task: Task, scores: Scores) -> dict[str, int]:
    if not is_band(task, scores.rule):
        return {}
    before, behind = band(task, scores.rule)
    return {"window_size_left": before, "window_size_right": behind}

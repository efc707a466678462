"""Attention on CPUs by torch's flash kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_cp.engine.kernels.contract import BackwardBlock, BlockKernel, Case
from mindspeed_cp.engine.kernels.products import padded
from mindspeed_cp.engine.kernels.rows import added, in_rows, without_empty
from mindspeed_cp.engine.masks import CAUSAL, MASKED
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import Task

_MOST_ROWS = 512
"""Query rows of a block with a mask or a bias."""


class CpuFlashKernel(BlockKernel):
    """torch's flash kernel: grouped heads without repeating keys, masks as something that is added."""

    name = "cpu-flash"
    devices = ("cpu",)

    def refusal(self, case: Case) -> str:
        """See `BlockKernel.refusal`."""
        if case.dropout:
            return "it drops no weights by position"
        if case.dtype == torch.float16:
            return "it does not compute float16"
        if case.value_width > case.width:
            return "values are wider than queries"
        return ""

    def parts(self, task: Task, scores: Scores, heads: int) -> Sequence[Task]:
        """Return whole rectangles and triangles; with a mask or a bias, blocks of rows."""
        if task.kind != MASKED and scores.slopes is None:
            return (task,)
        return in_rows(task, _MOST_ROWS)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, task: Task, scores: Scores) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        mask, empty = added(task, scores, q)
        output, logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_in_rows, (q, k, padded(v, q.shape[-1]))),
            0.0,
            task.kind == CAUSAL and mask is None,
            attn_mask=mask,
            scale=scores.scale,
        )
        # The kernel says 0 for rows without keys, which would count as one key.
        return without_empty(output[..., : v.shape[-1]], logsum, empty)

    def backward(self, block: BackwardBlock) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.backward`."""
        outer, q, k, v, output, logsum, task, scores = block
        mask, _ = added(task, scores, q)
        width = q.shape[-1]
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _in_rows(padded(outer, width)),
            *map(_in_rows, (q, k, padded(v, width))),
            _in_rows(padded(output, width).to(q.dtype)),
            logsum.contiguous(),
            0.0,
            task.kind == CAUSAL and mask is None,
            attn_mask=mask,
            scale=scores.scale,
        )
        return dq, dk, dv[..., : v.shape[-1]]


def _in_rows(tensor: Tensor) -> Tensor:
    """Copy a tensor whose rows are not contiguous: the kernel reads them as if they were."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

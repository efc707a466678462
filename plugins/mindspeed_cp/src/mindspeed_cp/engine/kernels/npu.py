"""Attention on Ascend devices by the fused kernel, through the operators of mindspeed-kernels.

The fused kernel describes a row by a maximum and a sum, eight times each; any pair with the right
``maximum + log(sum)`` is as good as any other. So one number for each row is kept, and backward is given
``(logsum, 1)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.engine.kernels.contract import BackwardBlock, BlockKernel, Case
from mindspeed_cp.engine.kernels.rows import band, hidden, in_rows, is_band, without_empty
from mindspeed_cp.engine.masks import CAUSAL, MASKED
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import Task

_WIDEST, _MOST_HEADS = 768, 256
_LANES = 8
_MASK_BYTES = 1 << 26
"""Largest mask of a task that has one of its own."""
_EXPLICIT, _CAUSAL, _BAND = 1, 3, 4
"""Sparse modes of the kernel: a mask of every score, up to the diagonal, a band around it."""


class NpuKernel(BlockKernel):
    """The fused kernel; in layout ``SBH`` or ``BNSD``."""

    name = "npu-fusion"

    def __init__(self, devices: tuple[str, ...] = ("npu",)) -> None:
        """Serve these types of devices; the operators of mindspeed-kernels must do so too."""
        self.devices = devices

    def missing(self) -> str:
        """See `BlockKernel.missing`."""
        return "" if find_spec("mindspeed_kernels") else "package mindspeed-kernels is not installed"

    def refusal(self, case: Case) -> str:
        """See `BlockKernel.refusal`."""
        if case.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return "it computes float32, float16 and bfloat16"
        if case.dropout:
            return "it draws dropped weights by itself, not by position"
        if case.bias and (case.kind == MASKED or not case.square):
            return "it knows the distances of as many queries as keys, without a mask"
        if case.width > _WIDEST or case.value_width > case.width:
            return f"widths are at most {_WIDEST}, values not wider than queries"
        return f"there are at most {_MOST_HEADS} heads" if case.heads > _MOST_HEADS else ""

    def parts(self, task: Task, scores: Scores, heads: int) -> Sequence[Task]:
        """Return whole tasks; blocks of rows where a mask is made for each score."""
        if task.kind != MASKED or is_band(task, scores.rule):
            return (task,)
        most = max(128, _MASK_BYTES // max(1, task.columns[1] - task.columns[0]))
        return in_rows(task, most)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, task: Task, scores: Scores) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        from mindspeed_kernels.attention.layouts import from_bnsd, to_bnsd
        from mindspeed_kernels.ops.fusion_attention import npu_fusion_attention

        heads, layout = q.shape[1], scores.layout
        options, empty = _options(task, scores, q.device)
        query, key, value = (from_bnsd(tensor, layout).contiguous() for tensor in (q, k, v))
        context, maximum, total, *_ = npu_fusion_attention(
            query, key, value, heads, layout, scale=scores.scale, **options
        )
        logsum = maximum[..., 0] + total[..., 0].log()
        return without_empty(to_bnsd(context, layout, heads), logsum, empty)

    def backward(self, block: BackwardBlock) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.backward`."""
        outer, q, k, v, output, logsum, task, scores = block
        from mindspeed_kernels.attention.layouts import from_bnsd, to_bnsd
        from mindspeed_kernels.ops.fusion_attention_grad import npu_fusion_attention_grad

        heads, layout = q.shape[1], scores.layout
        options, _ = _options(task, scores, q.device)
        query, key, value, context, gradient = (
            from_bnsd(tensor.to(q.dtype), layout).contiguous() for tensor in (q, k, v, output, outer)
        )
        maximum = logsum.float().unsqueeze(-1).expand(*logsum.shape, _LANES).contiguous()
        options |= {"softmax_max": maximum, "softmax_sum": torch.ones_like(maximum), "attention_in": context}
        dq, dk, dv, *_ = npu_fusion_attention_grad(
            query, key, value, gradient, heads, layout, scale_value=scores.scale, **options
        )
        key_heads = k.shape[1]
        return to_bnsd(dq, layout, heads), to_bnsd(dk, layout, key_heads), to_bnsd(dv, layout, key_heads)


def _options(task: Task, scores: Scores, device: torch.device) -> tuple[dict[str, Any], Tensor | None]:
    """Return the kernel's arguments for mask and bias of a task, and which rows see nothing."""
    options: dict[str, Any] = {}
    empty = None
    if task.kind == CAUSAL:
        options["sparse_mode"] = _CAUSAL
    elif is_band(task, scores.rule):
        before, behind = band(task, scores.rule)
        options |= {"sparse_mode": _BAND, "pre_tokens": before, "next_tokens": behind}
    elif task.kind == MASKED:
        mask = hidden(task, scores, device)
        if mask is not None:
            options |= {"sparse_mode": _EXPLICIT, "atten_mask": mask}
            empty = mask.all(1)
    if scores.slopes is not None:
        first, start = task.origin
        options |= {"pse": scores.slopes.to(device, torch.float32), "pse_type": 3 if scores.root else 2}
        options |= {"q_start_idx": [first], "kv_start_idx": [start]}
    return options, empty

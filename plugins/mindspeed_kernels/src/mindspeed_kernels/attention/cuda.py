"""Fused attention on CUDA where torch's own flash kernel computes exactly what is asked for.

The kernel knows causal and full attention of float16 and bfloat16, and drops weights itself. Whatever else
fused attention offers is computed block by block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.attention.arguments import Options, check_numbers, views
from mindspeed_kernels.ops.call import UNKNOWN, Call

_WIDEST = 256


def flash_limits(call: Call) -> str:
    """Why torch's flash kernel cannot serve a call; empty when it can."""
    if call.dtype("query") not in (torch.float16, torch.bfloat16):
        return "torch's flash kernel computes float16 and bfloat16"
    layout, mode = call["input_layout"], call["sparse_mode"]
    if layout is not UNKNOWN and layout.upper() == "TND":
        return "torch's flash kernel takes one length for all sequences"
    if mode is not UNKNOWN and mode not in (0, 1, 2):
        return f"torch's flash kernel has no sparse mode {mode}"
    extras = [name for name in ("pse", "sink", "dropout_mask") if call.given(name)]
    if mode != 2 and call.given("atten_mask"):
        extras.append("atten_mask")
    return f"torch's flash kernel takes no {', '.join(extras)}" if extras else ""


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, Tensor] | None:
    """Context ``[b, n, sq, dv]`` and logarithm of the sums ``[b, n, sq]``; None for heads that are too wide.

    Args:
        query: in ``options.layout``, like ``key`` and ``value``.
        key: fewer heads are repeated, which the kernel does not do itself.
        value: narrower heads are padded.
        options: those of fused attention, within `flash_limits`.
    """
    check_numbers(options)
    q, k, v = views(query, key, value, options)
    width = v.shape[3]
    room = -(-q.shape[3] // 8) * 8
    if room > _WIDEST:
        return None
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = (tensor.repeat_interleave(repeat, dim=1) for tensor in (k, v))
    q, k, v = (torch.nn.functional.pad(tensor, (0, room - tensor.shape[3])) for tensor in (q, k, v))
    context, logsum = _kernel(q, k, v, 1.0 - options.keep_prob, options.sparse_mode == 2, options.scale)
    return context[..., :width], logsum[..., : q.shape[2]]


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )
    return found[0], found[1]

"""Fused attention on CUDA through cuDNN, called with queries, keys and values as they lie in memory.

On Hopper it takes about half of the time of torch's flash kernel. It computes whole sequences, causal or not,
in 16 bits; everything else is left to `mindspeed_kernels.attention.cuda`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.attention.arguments import Options, check_numbers, views
from mindspeed_kernels.attention.cuda import flash_limits
from mindspeed_kernels.call import UNKNOWN, Call
from mindspeed_megatron.planned_kernels import kernels_for

_WIDTHS = 8
"""Heads have a multiple of this width."""
_WIDEST = 128
_OLDEST = (9, 0)
"""Compute capability from which on it is the faster one."""
_OLDEST_VERSION = 90000


def cudnn_missing() -> str:
    """Return why cuDNN cannot be used; empty when it can."""
    if kernels_for("cpu") != "cpu":
        return ""
    if not torch.cuda.is_available():
        return "no CUDA device"
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is None or version < _OLDEST_VERSION:
        return f"attention needs cuDNN 9, and torch has {version or 'none'}"
    return ""


def cudnn_limits(call: Call) -> str:
    """Return why cuDNN cannot serve a call, or is not the faster one; empty when it can and is."""
    reason = flash_limits(call)
    if reason:
        return reason.replace("torch's flash kernel", "cuDNN")
    if call["sparse_mode"] not in (0, 2, 3, UNKNOWN):
        return f"cuDNN is not asked for bands, and sparse mode {call['sparse_mode']} is one"
    keep, layout = call["keep_prob"], call["input_layout"]
    if keep is not UNKNOWN and keep < 1.0:
        return "dropped weights are left to torch's flash kernel"
    if isinstance(layout, str) and layout.upper() == "TND":
        return "packed sequences are left to torch's flash kernel"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _OLDEST:
        return "on devices before Hopper torch's flash kernel is as fast"
    return ""


def cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, Tensor] | None:
    """Compute context ``[b, n, sq, dv]`` and logarithm of the sums ``[b, n, sq]``.

    Args:
        query: in ``options.layout``, like ``key`` and ``value``.
        key: may have fewer heads.
        value: as wide as the others.
        options: those of fused attention, within `cudnn_limits`.

    Returns:
        None where numbers are outside of what is asked of it: odd or wide heads, no whole causal or complete
        mask, and where torch was told to use deterministic algorithms, which its backward is not.
    """
    # Not all that `prepare` finds out: this is called once per layer and micro-batch.
    check_numbers(options)
    q, k, v = views(query, key, value, options)
    width, sq, sk = q.shape[3], q.shape[2], k.shape[2]
    if width % _WIDTHS or width > _WIDEST or v.shape[3] != width or not (sq and sk):
        return None
    causal, longest = options.sparse_mode in (2, 3), max(sq, sk)
    complete = options.pre_tokens >= longest and options.next_tokens >= longest
    whole = sq == sk if causal else complete and options.sparse_mode == 0
    if not whole or torch.are_deterministic_algorithms_enabled():
        return None
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        _in_rows(q), _in_rows(k), _in_rows(v), None, True, 0.0, causal, False, scale=options.scale
    )
    context: Tensor = found[0]
    return context, found[1].detach().reshape(context.shape[:3])


def _in_rows(tensor: Tensor) -> Tensor:
    """Copy heads that do not lie in one piece."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

"""Fused attention on CUDA through cuDNN, called with queries, keys and values as they lie in memory.

On Hopper it takes about half of the time of torch's flash kernel. It computes whole sequences, causal or not,
in 16 bits; everything else is left to `mindspeed_kernels.attention.cuda`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_core.platforms.planned_kernels import kernels_for
from mindspeed_kernels.attention.arguments import Options, prepare
from mindspeed_kernels.attention.cuda import band_of, flash_limits
from mindspeed_kernels.call import UNKNOWN, Call

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
    inputs = prepare(query, key, value, options)
    band, width = band_of(inputs), inputs.query.shape[3]
    if band is None or width % _WIDTHS or width > _WIDEST or inputs.value.shape[3] != width:
        return None
    whole = band.left < 0 and band.keys == inputs.key.shape[2] and band.starts[0] is None
    causal = band.right == 0 and inputs.query.shape[2] == inputs.key.shape[2]
    if not whole or not (causal or band.right < 0) or torch.are_deterministic_algorithms_enabled():
        return None
    operands = [_in_rows(item) for item in (inputs.query, inputs.key, inputs.value)]
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *operands, None, True, 0.0, causal, False, scale=options.scale
    )
    context: Tensor = found[0]
    return context, found[1].detach().reshape(context.shape[:3])


def _in_rows(tensor: Tensor) -> Tensor:
    """Copy heads that do not lie in one piece."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

"""Fused attention on CUDA where torch's own kernels compute exactly what is asked for.

The flash kernel knows float16 and bfloat16, one band around the diagonal that ends at the last query and the
last key, packed sequences, fewer heads of keys, and drops weights itself. Whatever else fused attention
offers is computed block by block, or by `mindspeed_kernels.attention.flex`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.attention.arguments import Inputs, Options, prepare
from mindspeed_kernels.attention.block_kernels import Saved
from mindspeed_kernels.attention.blocks import AttentionCall
from mindspeed_kernels.attention.visibility import Visibility
from mindspeed_kernels.call import UNKNOWN, Call, TensorFacts

_FLEXIBLE = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 256
_WIDTHS = 8
"""Heads are padded to a multiple of this width."""


@dataclass(frozen=True)
class Band:
    """Arguments of the kernel for visible keys and packed sequences.

    Attributes:
        keys: how many of the leading keys take part; the others are seen by nobody.
        left: keys before the diagonal, -1 is no limit.
        right: keys behind it, -1 is no limit.
        starts: starts and ends of packed queries and of packed keys, both None without packing.
        longest: most queries and most keys of a sequence.
    """

    keys: int
    left: int
    right: int
    starts: tuple[Tensor, Tensor] | tuple[None, None]
    longest: tuple[int, int]


def flash_limits(call: Call) -> str:
    """Return why torch's flash kernel cannot serve a call; empty when it can."""
    if call.dtype("query") not in (torch.float16, torch.bfloat16):
        return "torch's flash kernel computes float16 and bfloat16"
    mode = call["sparse_mode"]
    if mode is not UNKNOWN and mode not in (0, 1, 2, 3, 4):
        return f"torch's flash kernel has no sparse mode {mode}"
    extras = [name for name in ("pse", "sink", "dropout_mask") if call.given(name)]
    if mode in (0, 1, UNKNOWN) and call.given("atten_mask"):
        extras.append("atten_mask")
    return f"torch's flash kernel takes no {', '.join(extras)}" if extras else ""


def flex_limits(call: Call) -> str:
    """Return why flex attention cannot serve a call; empty when it can."""
    if call.dtype("query") not in _FLEXIBLE:
        return "flex attention computes float16, bfloat16 and float32"
    keep = call["keep_prob"]
    if call.given("dropout_mask") or (keep is not UNKNOWN and keep < 1.0):
        return "flex attention drops no weights"
    pse = call["pse"]
    if isinstance(pse, TensorFacts):
        if pse.requires_grad:
            return "flex attention gives a bias no gradient"
        if call["pse_type"] in (0, 1) and call["input_layout"] in ("TND", "tnd"):
            return "flex attention takes no bias tensor of packed sequences"
    return ""


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, Tensor, bool] | None:
    """Compute context ``[b, n, sq, dv]`` and logarithm of the sums ``[b, n, sq]``; say if rows may be empty.

    Args:
        query: in ``options.layout``, like ``key`` and ``value``.
        key: may have fewer heads.
        value: narrower heads are padded.
        options: those of fused attention, within `flash_limits`.

    Returns:
        None where numbers are outside of what the kernel knows: heads too wide, bands that hide what is near,
        packed sequences with different bands.
    """
    inputs = prepare(query, key, value, options)
    band = band_of(inputs)
    if band is None:
        return None
    q, k, v = (_for_kernel(item, inputs) for item in (inputs.query, inputs.key, inputs.value))
    if band.keys != inputs.key.shape[2]:
        k, v = (item.narrow(1, 0, band.keys) for item in (k, v))
    context, logsum = _kernel(q, k, v, band, 1.0 - options.keep_prob, options.scale)
    if band.starts[0] is not None:
        context, logsum = context.unsqueeze(0), logsum.unsqueeze(0)
    width = inputs.value.shape[3]
    if context.shape[3] != width:
        # Backward of a part makes the whole anew.
        context = context.narrow(3, 0, width)
    empty = not all(_every_row_sees(piece.visibility) for piece in inputs.attention.pieces)
    return context.transpose(1, 2), logsum, empty


def flash_gradients(
    inputs: Inputs, gradient: Tensor, context: Tensor, logsum: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Compute the gradients of queries, keys, values, ``[b, n, s, d]``; None where `flash_attention` is.

    Args:
        inputs: queries, and the keys and values of a whole attention or of one part of it.
        gradient: of the context, ``[b, n, sq, dv]``.
        context: ``[b, n, sq, dv]``, of the whole.
        logsum: ``[b, n, sq]`` float32, of the whole.
    """
    band = band_of(inputs)
    if band is None:
        return None
    q, k, v, outer, whole = (
        _for_kernel(item, inputs) for item in (inputs.query, inputs.key, inputs.value, gradient, context)
    )
    if band.keys != inputs.key.shape[2]:
        k, v = (item.narrow(1, 0, band.keys) for item in (k, v))
    packed = band.starts[0] is not None
    sums = logsum.squeeze(0) if packed else logsum
    found = _backward((outer, q, k, v, whole, sums.contiguous()), band, inputs.attention.scale)
    to_query, to_key, to_value = (item.unsqueeze(0) if packed else item for item in found)
    missing = inputs.key.shape[2] - band.keys
    if missing:
        to_key, to_value = (
            torch.nn.functional.pad(item, (0, 0, 0, 0, 0, missing)) for item in (to_key, to_value)
        )
    width, value_width = inputs.query.shape[3], inputs.value.shape[3]
    dq, dk, dv = to_query.narrow(3, 0, width), to_key.narrow(3, 0, width), to_value.narrow(3, 0, value_width)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def band_of(inputs: Inputs) -> Band | None:
    """Return the band of all sequences; None where the kernel cannot express it."""
    if -(-inputs.query.shape[3] // _WIDTHS) * _WIDTHS > _WIDEST or inputs.attention.bias is not None:
        return None
    last = inputs.attention.pieces[-1:]
    if not last or last[0].rows[1] != inputs.query.shape[2] or last[0].columns[1] != inputs.key.shape[2]:
        return None
    pieces = [piece for piece in inputs.attention.pieces if piece.visibility.sq and piece.visibility.sk]
    bands = [_band(piece.visibility) for piece in pieces]
    if not bands or any(band is None or band != bands[0] for band in bands[1:]) or bands[0] is None:
        return None
    keys_missing, left, right = bands[0]
    packed = len(inputs.attention.pieces) > 1
    if packed and keys_missing:
        return None
    longest = max(p.visibility.sq for p in pieces), max(p.visibility.sk for p in pieces) - keys_missing
    starts = _starts(inputs.attention, inputs.query.device) if packed else (None, None)
    return Band(inputs.key.shape[2] - keys_missing, left, right, starts, longest)


def _band(seen: Visibility) -> tuple[int, int, int] | None:
    """Return trailing keys that nobody sees, and the limits of the others."""
    if seen.hidden is not None or seen.prefix:
        return None
    keys = seen.sk if seen.right is None else min(seen.sk, max(0, seen.sq + seen.offset + seen.right))
    if not keys:
        return None
    # Limits count from the diagonal of the keys that are left over.
    shift = seen.offset - (keys - seen.sq)
    left = -1 if seen.left is None else seen.left - shift
    right = -1 if seen.right is None else seen.right + shift
    if (seen.left is not None and left < 0) or (seen.right is not None and right < 0):
        return None
    return seen.sk - keys, left, right


def _every_row_sees(seen: Visibility) -> bool:
    """Return whether every query of a band sees a key: the first one has to, and the last one."""
    first = seen.right is None or seen.offset + seen.right >= 0
    last = seen.left is None or seen.sq + seen.offset - seen.left <= seen.sk
    return not seen.sq or (seen.sk > 0 and first and last)


def _starts(attention: AttentionCall, device: torch.device) -> tuple[Tensor, Tensor]:
    rows = [0, *(piece.rows[1] for piece in attention.pieces)]
    columns = [0, *(piece.columns[1] for piece in attention.pieces)]
    options: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return torch.tensor(rows, **options), torch.tensor(columns, **options)


def _for_kernel(tensor: Tensor, inputs: Inputs) -> Tensor:
    """Return ``[b, n, s, d]`` as ``[b, s, n, d]``, packed as ``[t, n, d]``, as wide as the kernel takes."""
    missing = -(-inputs.query.shape[3] // _WIDTHS) * _WIDTHS - tensor.shape[3]
    tensor = torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
    tensor = tensor.transpose(1, 2)
    return tensor.squeeze(0) if len(inputs.attention.pieces) > 1 else tensor


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, band: Band, dropout: float, scale: float
) -> tuple[Tensor, Tensor]:
    causal = band.left < 0 and band.right == 0
    found = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *band.starts,
        *band.longest,
        dropout,
        causal,
        False,
        scale=scale,
        window_size_left=None if causal else band.left,
        window_size_right=None if causal else band.right,
    )
    return found[0], found[1]


def _backward(tensors: Saved, band: Band, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    causal, device = band.left < 0 and band.right == 0, tensors[0].device
    # Nothing was dropped, so nothing is read from the state of the random numbers.
    state = torch.zeros(2, dtype=torch.uint64, device=device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *tensors,
        *band.starts,
        *band.longest,
        0.0,
        causal,
        state,
        torch.empty(0, device=device),
        scale=scale,
        window_size_left=None if causal else band.left,
        window_size_right=None if causal else band.right,
    )
    return found

"""Fused attention on CUDA through torch's flex attention, whose kernel is compiled for the mask and the bias.

Bands, prefixes, mask tensors and packed sequences become a range of keys per query; slopes and bias tensors
are read inside of the kernel. Compiling it takes seconds, so it is taken only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from mindspeed_kernels.attention.arguments import Inputs
from mindspeed_kernels.attention.bias import Bias, compressed
from mindspeed_kernels.attention.blocks import Piece
from mindspeed_kernels.attention.blockwise import with_sink
from mindspeed_megatron.instruments.work_counter import count_compiled_attention

_NARROWEST = 16
"""The narrowest heads that a compiled kernel takes."""
_Position = Any
"""An index inside of a kernel: a tensor without dimensions."""


@dataclass(frozen=True)
class _Ranges:
    """Visible keys of each query.

    Attributes:
        first: ``[sq]``, the first key of its band.
        last: ``[sq]``, the last one.
        start: ``[sq]``, the first key of its sequence.
        prefix: ``[b | 1, sq]``, the key behind the prefix of its sequence, or None.
        row: ``[sq]``, number of the query in its sequence.
        column: ``[sk]``, number of the key in its sequence.
    """

    first: Tensor
    last: Tensor
    start: Tensor
    prefix: Tensor | None
    row: Tensor
    column: Tensor


def flex(inputs: Inputs, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute context ``[b, n, sq, dv]`` and logarithm of the sums ``[b, n, sq]``, infinite for empty rows.

    ``sink`` ``[n]`` is a further score of every row without a value; inputs are within `cuda.flex_limits`.
    """
    query, key, value, attention = inputs.query, inputs.key, inputs.value, inputs.attention
    visible = _mask_of(attention.pieces, query, key)
    attend: Any = flex_attention
    compiled = query.device.type == "cuda"
    if compiled:
        attend = _compiled(attend)
    context, found = attend(
        *wide_enough(query, key, value),
        score_mod=None if attention.bias is None else _bias_of(attention.bias, inputs),
        block_mask=visible,
        scale=attention.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if compiled and not torch.compiler.is_compiling():
        count_compiled_attention(context, query, key, value)
    logsum = found.lse.masked_fill(found.lse == float("-inf"), float("inf"))
    return with_sink(context[..., : value.shape[3]], logsum, sink)


def wide_enough(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return heads padded with zeros, which change no score, where they are narrower than kernels compute."""
    return tuple(
        torch.nn.functional.pad(tensor, (0, max(0, _NARROWEST - tensor.shape[3])))
        if tensor.device.type == "cuda"
        else tensor
        for tensor in tensors
    )


@lru_cache(maxsize=2)
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function)

    def call(*args: Any, **options: Any) -> Any:
        # Inside of a larger graph the function is compiled with the graph around it.
        return function(*args, **options) if torch.compiler.is_compiling() else compiled(*args, **options)

    return call


def _mask_of(pieces: tuple[Piece, ...], query: Tensor, key: Tensor) -> BlockMask | None:
    """Return the mask of all sequences, made once for all layers; None where every query sees every key."""
    if len(pieces) == 1 and pieces[0].visibility.complete:
        return None
    sizes = query.shape[0], query.shape[2], key.shape[2]
    if active_fake_mode() is not None or any(piece.visibility.hidden is not None for piece in pieces):
        return _made_mask(pieces, sizes, query.device)
    return _kept_mask(pieces, sizes, query.device)


def _made_mask(pieces: tuple[Piece, ...], sizes: tuple[int, int, int], device: torch.device) -> BlockMask:
    batch, sq, sk = sizes
    ranges, hidden = _ranges(pieces, batch, sq, sk, device), pieces[0].visibility.hidden
    first, last, start, prefix = ranges.first, ranges.last, ranges.start, ranges.prefix

    def visible(b: _Position, h: _Position, i: _Position, j: _Position) -> Tensor:
        seen: Tensor = (j >= first[i]) & (j <= last[i])
        if prefix is not None:
            seen = seen | ((j >= start[i]) & (j < prefix[b, i]))
        if hidden is not None:
            seen = seen & ~hidden[b if hidden.shape[0] > 1 else 0, h if hidden.shape[1] > 1 else 0, i, j]
        return seen

    samples = max(1 if prefix is None else batch, 1 if hidden is None else hidden.shape[0])
    heads = None if hidden is None or hidden.shape[1] == 1 else hidden.shape[1]
    make: Any = create_block_mask
    if device.type == "cuda":
        make = _compiled(make)
    mask: BlockMask = make(visible, samples if samples > 1 else None, heads, sq, sk, device=str(device))
    return mask


_kept_mask = lru_cache(maxsize=8)(_made_mask)


def _ranges(pieces: tuple[Piece, ...], batch: int, sq: int, sk: int, device: torch.device) -> _Ranges:
    first, last, start, row = (torch.zeros(sq, dtype=torch.int32) for _ in range(4))
    column = torch.zeros(sk, dtype=torch.int32)
    with_prefix = any(piece.visibility.prefix for piece in pieces)
    prefix = torch.zeros(batch, sq, dtype=torch.int32) if with_prefix else None
    for piece in pieces:
        seen, begin = piece.visibility, piece.columns[0]
        rows, position = slice(*piece.rows), torch.arange(seen.sq, dtype=torch.int32)
        row[rows], start[rows] = position, begin
        column[slice(*piece.columns)] = torch.arange(seen.sk, dtype=torch.int32)
        low = position + (seen.offset - seen.left) if seen.left is not None else torch.zeros_like(position)
        high = position + (seen.offset + seen.right) if seen.right is not None else position * 0 + seen.sk
        first[rows], last[rows] = low.clamp(min=0) + begin, high.clamp(max=seen.sk - 1) + begin
        if prefix is not None:
            leading = torch.tensor(seen.prefix or (0,), dtype=torch.int32)
            prefix[:, rows] = leading.unsqueeze(1) + begin
    found = (first, last, start, prefix, row, column)
    return _Ranges(*(None if item is None else item.to(device) for item in found))  # type: ignore[arg-type]


def _bias_of(bias: Bias, inputs: Inputs) -> Callable[..., Tensor]:
    """Return the function that adds the bias to one score."""
    slopes, tensor, start, factor = bias.slopes, bias.tensor, bias.start, bias.factor
    if slopes is None:
        assert tensor is not None
        return _tensor_bias(tensor, factor, inputs.query.shape[2])
    sizes = inputs.query.shape[0], inputs.query.shape[2], inputs.key.shape[2]
    ranges = _ranges(inputs.attention.pieces, *sizes, inputs.query.device)
    row, column, per_sample = ranges.row, ranges.column, slopes.shape[0] > 1

    def add(score: Tensor, b: _Position, h: _Position, i: _Position, j: _Position) -> Tensor:
        distance = (row[i] + start - column[j]).abs().to(slopes.dtype)
        slope = slopes[b if per_sample else 0, h]
        return score - slope * (distance.sqrt() if bias.root else distance)

    return add


def _tensor_bias(tensor: Tensor, factor: float, sq: int) -> Callable[..., Tensor]:
    samples, rows, keys = tensor.shape[0], tensor.shape[2], tensor.shape[3]
    folded = compressed(tensor, sq)

    def add(score: Tensor, b: _Position, h: _Position, i: _Position, j: _Position) -> Tensor:
        sample = b if samples > 1 else 0
        if folded:
            # The last row knows the bias of every distance to a key that is not behind its query.
            return score + tensor[sample, h, rows - 1, keys - 1 - (i - j).clamp(min=0)] * factor
        return score + tensor[sample, h, i if rows > 1 else 0, j] * factor

    return add

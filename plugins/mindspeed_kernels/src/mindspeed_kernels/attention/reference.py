"""The definition of attention and of its gradients: every score in memory, in the widest sensible dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.attention.arguments import Inputs
from mindspeed_kernels.attention.blocks import AttentionCall, Piece


def dense_attention(inputs: Inputs, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute context ``[b, n, sq, dv]``, row maxima and row sums ``[b, n, sq]`` of all sequences.

    ``sink`` ``[n]`` is a further score of every row without a value.
    """
    results = [_sequence(inputs, piece, sink) for piece in inputs.attention.pieces]
    query, value = inputs.query, inputs.value
    rest = query.shape[2] - sum(piece.visibility.sq for piece in inputs.attention.pieces)
    if rest:
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = (*query.shape[:2], rest)
        lowest = query.new_full(shape, torch.finfo(wide).min, dtype=wide)
        results.append((query.new_zeros(*shape, value.shape[3]), lowest, torch.zeros_like(lowest)))
    context, maximum, total = (torch.cat(parts, dim=2) for parts in zip(*results))
    return context, maximum, total


def _sequence(inputs: Inputs, piece: Piece, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = _of_piece(inputs, piece)
    scores = _scores(query, key, inputs.attention, piece)
    if sink is not None:
        column = sink.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    return _normalized(scores, value, inputs.attention, piece, sink is not None, inputs.query.dtype)


def _of_piece(inputs: Inputs, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of one sequence, the last two repeated to as many heads as queries."""
    rows, columns = slice(*piece.rows), slice(*piece.columns)
    wide = torch.promote_types(inputs.query.dtype, torch.float32)
    repeat = inputs.query.shape[1] // inputs.key.shape[1]
    key, value = (
        tensor[:, :, columns].to(wide).repeat_interleave(repeat, dim=1)
        for tensor in (inputs.key, inputs.value)
    )
    return inputs.query[:, :, rows].to(wide), key, value


def _scores(query: Tensor, key: Tensor, attention: AttentionCall, piece: Piece) -> Tensor:
    seen = piece.visibility
    scores = query @ key.transpose(-1, -2) * attention.scale
    if attention.bias is not None:
        scores = scores + attention.bias.block((0, seen.sq), (0, seen.sk), seen.sq, piece.sample)
    visible = seen.block((0, seen.sq), (0, seen.sk), query.device)
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


def dense_gradients(
    inputs: Inputs, gradient: Tensor, context: Tensor, logsum: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of queries, keys, values, of the bias tensor and of the sink.

    Args:
        inputs: queries, keys, values and the attention.
        gradient: of the context, ``[b, n, sq, dv]``.
        context: from forward, possibly of more keys than these.
        logsum: logarithm of the sum of exponentials ``[b, n, sq]``, likewise; infinite for rows without keys.
        sink: ``[n]``.
    """
    wide = torch.promote_types(inputs.query.dtype, torch.float32)
    attention, groups = inputs.attention, inputs.key.shape[1]
    to_query, to_key, to_value = (
        torch.zeros_like(tensor, dtype=wide) for tensor in (inputs.query, inputs.key, inputs.value)
    )
    tensor = None if attention.bias is None else attention.bias.tensor
    to_bias = None if tensor is None else torch.zeros_like(tensor, dtype=wide)
    delta = (gradient.to(wide) * context.to(wide)).sum(-1, keepdim=True)
    for piece in attention.pieces:
        rows, columns = slice(*piece.rows), slice(*piece.columns)
        query, key, value = _of_piece(inputs, piece)
        weights = (_scores(query, key, attention, piece) - logsum[:, :, rows].unsqueeze(-1)).exp()
        kept: Tensor | float = 1.0
        if attention.kept is not None:
            kept = attention.kept[:, :, rows, columns].to(wide) / attention.keep
        outer = gradient[:, :, rows].to(wide)
        to_value[:, :, columns] += _summed((weights * kept).transpose(-1, -2) @ outer, groups)
        to_scores = weights * ((outer @ value.transpose(-1, -2)) * kept - delta[:, :, rows])
        to_query[:, :, rows] = to_scores @ key * attention.scale
        to_key[:, :, columns] += _summed(to_scores.transpose(-1, -2) @ query, groups) * attention.scale
        if to_bias is not None and attention.bias is not None and to_bias.shape[2:] == to_scores.shape[2:]:
            to_bias += to_scores.sum_to_size(to_bias.shape) * attention.bias.factor
    to_sink = None
    if sink is not None:
        weight = (sink.to(wide).view(1, -1, 1) - logsum).exp()
        to_sink = -(weight * delta.squeeze(-1)).sum((0, 2)).to(sink.dtype)
    found = [part.to(inputs.query.dtype) for part in (to_query, to_key, to_value)]
    return found[0], found[1], found[2], None if to_bias is None else to_bias.to(inputs.query.dtype), to_sink


def _summed(tensor: Tensor, groups: int) -> Tensor:
    """Return ``[b, n, s, d]`` as ``[b, g, s, d]``: the sum over the queries that share a head."""
    return tensor.unflatten(1, (groups, -1)).sum(2)


def _normalized(
    scores: Tensor, value: Tensor, attention: AttentionCall, piece: Piece, with_sink: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    lowest = torch.finfo(scores.dtype).min
    if not scores.shape[-1]:
        scores = scores.new_full((*scores.shape[:3], 1), float("-inf"))
        value = value.new_zeros((*value.shape[:2], 1, value.shape[3]))
    maximum = scores.detach().amax(-1, keepdim=True).clamp_min(lowest)
    exponentials = (scores - maximum).exp()
    total = exponentials.sum(-1, keepdim=True)
    # Rows that see nothing have the sum zero; any divisor gives them the context zero.
    weights = exponentials / torch.where(total > 0, total, torch.ones_like(total))
    if with_sink:
        weights = weights[..., :-1]
    if attention.kept is not None:
        kept = attention.kept[:, :, slice(*piece.rows), slice(*piece.columns)]
        weights = weights * kept / attention.keep
    elif attention.keep < 1.0:
        weights = torch.nn.functional.dropout(weights, 1.0 - attention.keep)
    context = (weights @ value).to(dtype)
    return context, maximum.squeeze(-1), total.detach().squeeze(-1)

"""Attention block by block of queries (Dao et al., 2022): no score matrix, any mask, bias, dropout and sink.

Forward returns the context and one number per row, the logarithm of the sum of exponentials; backward needs
nothing else than these two and the inputs, so blocks of one attention may even live on different ranks. On
CPUs torch's flash kernel computes each block; elsewhere, and with dropout or a gradient of the bias, matrix
products do. Shapes: queries and gradients ``[b, n, sq, d]``, keys ``[b, g, sk, d]``; ``g`` divides ``n``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.attention.bias import Bias
from mindspeed_kernels.attention.visibility import Visibility

_MASK_ELEMENTS = 1 << 20
_SCORE_ELEMENTS = 1 << 20
_MOST_ROWS = 256
_FEWEST_ROWS = 16


@dataclass(frozen=True)
class Piece:
    """One sequence: a range of queries that attends to a range of keys.

    Attributes:
        rows: queries, from and to (exclusive).
        columns: keys, from and to.
        visibility: which keys they see.
        sample: which sample of a bias belongs to the sequence, None for all at once.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    visibility: Visibility
    sample: int | None = None


@dataclass(frozen=True)
class Problem:
    """Everything about an attention besides queries, keys and values.

    Attributes:
        pieces: the sequences.
        scale: factor of the scores.
        bias: added to the scores.
        keep: probability of keeping an attention weight.
        seed: of the dropped weights.
        kept: ``[b, n, sq, sk]`` bool, the weights to keep instead of random ones.
    """

    pieces: tuple[Piece, ...]
    scale: float
    bias: Bias | None = None
    keep: float = 1.0
    seed: int = 0
    kept: Tensor | None = field(default=None)

    @property
    def drops(self) -> bool:
        """Whether attention weights are dropped."""
        return self.keep < 1.0 or self.kept is not None


@dataclass(frozen=True)
class _Block:
    """Queries and keys of one call of a kernel.

    Attributes:
        piece: the sequence they belong to.
        rows: queries, from and to, counted in the sequence.
        columns: keys, from and to, counted in the sequence.
        causal: the kernel hides what is above the diagonal itself.
        whole: nothing has to be hidden or added besides.
        number: position among all blocks, for random numbers.
    """

    piece: Piece
    rows: tuple[int, int]
    columns: tuple[int, int]
    causal: bool
    whole: bool
    number: int

    def of_rows(self, tensor: Tensor) -> Tensor:
        """The block's queries of ``[b, n, sq, ...]``."""
        first = self.piece.rows[0]
        return tensor[:, :, first + self.rows[0] : first + self.rows[1]]

    def of_columns(self, tensor: Tensor) -> Tensor:
        """The block's keys of ``[b, g, sk, ...]``."""
        first = self.piece.columns[0]
        return tensor[:, :, first + self.columns[0] : first + self.columns[1]]


@dataclass(frozen=True)
class _Mask:
    """What is added to a block's scores, and which of its rows see nothing; each may be None."""

    added: Tensor | None = None
    empty: Tensor | None = None


def _blocks(problem: Problem, heads: int, flash: bool) -> list[_Block]:
    found: list[_Block] = []
    for piece in problem.pieces:
        seen = piece.visibility
        whole = problem.bias is None and flash and (seen.complete or seen.causal)
        step = max(1, seen.sq) if whole else _rows(problem, seen, heads, flash)
        for start in range(0, seen.sq, step):
            rows = (start, min(start + step, seen.sq))
            columns = (0, seen.sk) if whole else seen.columns(*rows)
            if columns[0] < columns[1]:
                causal = whole and not seen.complete
                found.append(_Block(piece, rows, columns, causal, whole, len(found)))
    return found


def _rows(problem: Problem, seen: Visibility, heads: int, flash: bool) -> int:
    """How many queries a block has, so that its mask or its scores stay small."""
    per_head = problem.bias is not None or (seen.hidden is not None and seen.hidden.shape[1] > 1)
    budget = _MASK_ELEMENTS if flash else _SCORE_ELEMENTS
    width = max(1, seen.sk * (heads if per_head or not flash else 1))
    return max(_FEWEST_ROWS, min(_MOST_ROWS, budget // width))


def _mask(problem: Problem, block: _Block, device: torch.device) -> _Mask:
    """Bias and hidden keys of a block; made when the block is computed, since all of them would be large."""
    if block.whole:
        return _Mask()
    seen, bias = block.piece.visibility, None
    visible = seen.block(block.rows, block.columns, device)
    if problem.bias is not None:
        bias = problem.bias.block(block.rows, block.columns, seen.sq, block.piece.sample)
    if visible is None:
        return _Mask(bias)
    empty = ~visible.any(-1) if seen.may_see_nothing else None
    if bias is None:
        zero = torch.zeros((), dtype=torch.float32, device=device)
        return _Mask(torch.where(visible, zero, float("-inf")), empty)
    return _Mask(bias.masked_fill(~visible, float("-inf")), empty)


def _with_flash(query: Tensor, problem: Problem, bias_gradient: bool) -> bool:
    return query.device.type == "cpu" and not problem.drops and not bias_gradient


class BlockwiseAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the context and one number per row."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        problem: Problem,
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            ctx: of autograd.
            query: ``[b, n, sq, d]``.
            key: ``[b, g, sk, d]``.
            value: ``[b, g, sk, dv]``.
            bias: the tensor of ``problem.bias``, for its gradient.
            sink: ``[n]``, a score that takes part in the softmax and has no value.
            problem: everything else.

        Returns:
            The context ``[b, n, sq, dv]`` and the logarithm of the sum of exponentials ``[b, n, sq]`` in
            float32, which is infinite for rows that see nothing; their context is zero.
        """
        context, logsum = attend(query, key, value, sink, problem)
        ctx.save_for_backward(query, key, value, bias, sink, context, logsum)
        ctx.problem = problem
        ctx.mark_non_differentiable(logsum)
        return context, logsum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the three inputs, of the bias tensor and of the sink."""
        query, key, value, bias, sink, context, logsum = ctx.saved_tensors
        found = attend_backward(
            gradients[0],
            query,
            key,
            value,
            bias if ctx.needs_input_grad[3] else None,
            sink if ctx.needs_input_grad[4] else None,
            context,
            logsum,
            ctx.problem,
        )
        return (*found, None)


def attend(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor]:
    """Context and logarithm of the sum of exponentials; see `BlockwiseAttention.forward`."""
    batch, heads, sq, _ = query.shape
    width = value.shape[3]
    flash = _with_flash(query, problem, False)
    value = _padded(value, query.shape[3]) if flash else value
    kernel = _flash_forward if flash else _product_forward
    blocks = _blocks(problem, heads, flash)
    whole = _covers(blocks, query, key)
    wide = torch.promote_types(query.dtype, torch.float32)
    if not whole:
        result = query.new_zeros(batch, heads, sq, width)
        logsums = query.new_full((batch, heads, sq), float("inf"), dtype=wide)
    for block in blocks:
        mask = _mask(problem, block, query.device)
        inputs = block.of_rows(query), block.of_columns(key), block.of_columns(value)
        context, logsum = kernel(*inputs, mask, block, problem)
        if mask.empty is not None:
            context = context.masked_fill(mask.empty.unsqueeze(-1), 0.0)
            logsum = logsum.masked_fill(mask.empty, float("inf"))
        if whole:
            result, logsums = context[..., :width], logsum
        else:
            block.of_rows(result).copy_(context[..., :width])
            block.of_rows(logsums).copy_(logsum)
    return _with_sink(result, logsums, sink)


def _covers(blocks: list[_Block], query: Tensor, key: Tensor) -> bool:
    """Whether there is one block, of all queries and all keys."""
    if len(blocks) != 1:
        return False
    block = blocks[0]
    sizes = block.of_rows(query).shape[2], block.of_columns(key).shape[2]
    return sizes == (query.shape[2], key.shape[2])


def _with_sink(context: Tensor, logsum: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    if sink is None:
        return context, logsum
    score = sink.to(logsum.dtype).view(1, -1, 1)
    known = logsum.masked_fill(logsum.isinf(), float("-inf"))
    total = torch.logaddexp(known, score)
    return context * (known - total).exp().unsqueeze(-1).to(context.dtype), total


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    context: Tensor,
    logsum: Tensor,
    problem: Problem,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of queries, keys, values, the bias tensor and the sink; the last two where they are given.

    ``context`` and ``logsum`` may be those of a larger attention of which these keys are one part.
    """
    heads, width = query.shape[1], value.shape[3]
    flash = _with_flash(query, problem, bias is not None)
    blocks = _blocks(problem, heads, flash)
    if flash:
        value, context, gradient = (_padded(item, query.shape[3]) for item in (value, context, gradient))
    kernel = _flash_backward if flash else _product_backward
    to_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    sums = None
    if not _covers(blocks, query, key):
        sums = torch.zeros_like(query), _sums_like(key), _sums_like(value)
    to_query, to_key, to_value = sums or (query, key, value)
    for block in blocks:
        mask = _mask(problem, block, query.device)
        found = kernel(
            block.of_rows(gradient),
            block.of_rows(query),
            block.of_rows(context),
            block.of_rows(logsum),
            block.of_columns(key),
            block.of_columns(value),
            mask,
            block,
            problem,
        )
        if to_bias is not None:
            _add_to_bias(to_bias, found[3], block, problem)
        if sums is None:
            to_query, to_key, to_value = found[:3]
        else:
            block.of_rows(sums[0]).copy_(found[0])
            block.of_columns(sums[1]).add_(found[1])
            block.of_columns(sums[2]).add_(found[2])
    to_sink = None
    if sink is not None:
        weight = (sink.to(logsum.dtype).view(1, -1, 1) - logsum).exp()
        delta = (gradient.to(weight.dtype) * context.to(weight.dtype)).sum(-1)
        to_sink = -(weight * delta).sum((0, 2)).to(sink.dtype)
    return (
        to_query,
        to_key.to(key.dtype),
        to_value[..., :width].to(value.dtype),
        None if to_bias is None or bias is None else to_bias.to(bias.dtype),
        to_sink,
    )


def _sums_like(tensor: Tensor) -> Tensor:
    """Room for the sum over blocks of a gradient, in at least float32."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _padded(tensor: Tensor, width: int) -> Tensor:
    # The kernel wants one width of keys and values; added columns of zeros change nothing else.
    missing = width - tensor.shape[3]
    return tensor if not missing else torch.nn.functional.pad(tensor, (0, missing))


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: _Mask, block: _Block, problem: Problem
) -> tuple[Tensor, Tensor]:
    context, logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, block.causal, attn_mask=_for_kernel(mask.added, query), scale=problem.scale
    )
    return context, logsum


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    context: Tensor,
    logsum: Tensor,
    key: Tensor,
    value: Tensor,
    mask: _Mask,
    block: _Block,
    problem: Problem,
) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient,
        query,
        key,
        value,
        context,
        logsum,
        0.0,
        block.causal,
        attn_mask=_for_kernel(mask.added, query),
        scale=problem.scale,
    )
    return found


def _for_kernel(mask: Tensor | None, query: Tensor) -> Tensor | None:
    wide = torch.promote_types(query.dtype, torch.float32)
    return None if mask is None else mask.to(wide)


def _product_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: _Mask, block: _Block, problem: Problem
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, mask, problem)
    logsum = scores.logsumexp(-1)
    # Rows without a visible key: exp(-inf - inf) is zero, exp(-inf + inf) would not be a number.
    logsum = logsum.masked_fill(logsum == float("-inf"), float("inf"))
    weights = scores.sub_(logsum.unsqueeze(-1)).exp_()
    kept = _kept(weights, block, problem)
    if kept is not None:
        weights = weights * kept
    return _grouped(weights.to(value.dtype), value.shape[1]).matmul(value).view(
        *query.shape[:3], value.shape[3]
    ), logsum


def _product_backward(
    gradient: Tensor,
    query: Tensor,
    context: Tensor,
    logsum: Tensor,
    key: Tensor,
    value: Tensor,
    mask: _Mask,
    block: _Block,
    problem: Problem,
) -> tuple[Tensor, ...]:
    groups = key.shape[1]
    weights = _scores(query, key, mask, problem).sub_(logsum.unsqueeze(-1)).exp_()
    delta = (gradient.to(weights.dtype) * context.to(weights.dtype)).sum(-1, keepdim=True)
    outer = _grouped(gradient.to(value.dtype), groups)
    to_weights = outer.matmul(value.transpose(-1, -2)).view(weights.shape).to(weights.dtype)
    kept = _kept(weights, block, problem)
    used = weights if kept is None else weights * kept
    to_value = _grouped(used.to(value.dtype), groups).transpose(-1, -2).matmul(outer)
    to_weights = to_weights if kept is None else to_weights * kept
    to_scores = to_weights.sub_(delta).mul_(weights)
    grouped = _grouped(to_scores.to(key.dtype), groups)
    to_query = grouped.matmul(key).view(query.shape) * problem.scale
    to_key = grouped.transpose(-1, -2).matmul(_grouped(query, groups)) * problem.scale
    return to_query, to_key, to_value, to_scores


def _scores(query: Tensor, key: Tensor, mask: _Mask, problem: Problem) -> Tensor:
    """``[b, n, sq, sk]`` in at least float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    if query.device.type == "cpu":
        query, key = query.to(wide), key.to(wide)
    grouped = _grouped(query, key.shape[1])
    scores = grouped.matmul(key.transpose(-1, -2)).view(*query.shape[:3], key.shape[2]).to(wide)
    scores = scores * problem.scale
    return scores if mask.added is None else scores.add_(mask.added)


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """``[b, n, s, x]`` as ``[b, g, n / g * s, x]``: the queries that share keys lie behind one another."""
    return tensor.reshape(tensor.shape[0], groups, -1, tensor.shape[3])


def _kept(weights: Tensor, block: _Block, problem: Problem) -> Tensor | None:
    """The factors of kept weights, zero for dropped ones; the same whenever a block is computed again."""
    if not problem.drops:
        return None
    if problem.kept is not None:
        kept = block.of_rows(problem.kept)[..., slice(*block.columns)]
        return kept.to(weights.dtype) / problem.keep
    generator = torch.Generator(weights.device).manual_seed(problem.seed + block.number)
    drawn = torch.rand(weights.shape, generator=generator, device=weights.device) < problem.keep
    return drawn.to(weights.dtype) / problem.keep


def _add_to_bias(total: Tensor, to_scores: Tensor, block: _Block, problem: Problem) -> None:
    """Add a block's gradient of the scores to that of the bias tensor, summed over what was broadcast."""
    assert problem.bias is not None
    part = to_scores if total.shape[0] > 1 else to_scores.sum(0, keepdim=True)
    rows = slice(*block.rows)
    if total.shape[2] == 1:
        part, rows = part.sum(2, keepdim=True), slice(0, 1)
    total[:, :, rows, slice(*block.columns)] += part * problem.bias.factor

"""The block kernel: attention of some rows to some keys, with the log of the summed exponentials.

Forward gives the block's own output and log-sum; `Merger` joins blocks of any number of keys in float32.
Backward takes the *whole* attention's output and log-sum, which is what makes the gradients of separate
blocks add up exactly. Tensors are ``[b, n, s, d]`` with ``g`` key heads dividing ``n``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.engine.masks import CAUSAL, FULL, MASKED, MaskRule
from mindspeed_cp.engine.tasks import Task

_MOST_ROWS = 512
"""Query rows of a block with a mask, a bias or dropout: what is made for them stays small."""


@dataclass(frozen=True)
class Dropout:
    """Attention dropout as a function of the score's place, the same for every layout.

    Attributes:
        probability: of dropping an attention weight.
        seed: of this layer and micro-batch.
        first_sample: number of the first sample.
    """

    probability: float
    seed: int
    first_sample: int = 0

    def kept(self, heads: Tensor, samples: int, queries: Tensor, keys: Tensor) -> Tensor:
        """``[b, n, q, k]`` bool: which weights stay, by global head and global positions."""
        state = torch.full((), self.seed & 0xFFFFFFFF, dtype=torch.int64, device=queries.device)
        sample = torch.arange(self.first_sample, self.first_sample + samples, device=queries.device)
        for value, shape in (
            (sample, (-1, 1, 1, 1)),
            (heads, (1, -1, 1, 1)),
            (queries, (1, 1, -1, 1)),
            (keys, (1, 1, 1, -1)),
        ):
            state = _mixed(state ^ (value.view(shape) * 0x9E3779B1 & 0xFFFFFFFF))
        return state >= int(self.probability * 2**32)


def _mixed(state: Tensor) -> Tensor:
    """A 32-bit integer hash (a multiply-xorshift finalizer), in int64."""
    state = (state ^ (state >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ (state >> 16)


@dataclass(frozen=True)
class Scores:
    """What besides queries and keys decides about scores and weights.

    Attributes:
        scale: factor of the products.
        rule: which scores count.
        heads: ``[n]`` int64, global numbers of the query heads here; for slopes and dropout.
        slopes: ``[n]`` float32, bias ``-slope * |distance|``; None without.
        dropout: None without.
    """

    scale: float
    rule: MaskRule
    heads: Tensor | None = None
    slopes: Tensor | None = None
    dropout: Dropout | None = None

    @property
    def positional(self) -> bool:
        """Whether the kernel needs global positions."""
        return self.slopes is not None or self.dropout is not None


def _row_blocks(task: Task, scores: Scores) -> list[Task]:
    """A task in blocks of few rows where something is made for each score."""
    whole = task.kind != MASKED and not scores.positional
    if whole or task.rows[1] - task.rows[0] <= _MOST_ROWS:
        return [task]
    found = []
    for start in range(task.rows[0], task.rows[1], _MOST_ROWS):
        end = min(start + _MOST_ROWS, task.rows[1])
        offset = start - task.rows[0]
        kind = MASKED if task.kind == CAUSAL else task.kind
        found.append(Task((start, end), task.columns, kind, (task.origin[0] + offset, task.origin[1])))
    return found


def _added(task: Task, scores: Scores, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the scores, ``[1, n or 1, q, k]`` float32, and which rows see nothing."""
    if task.kind != MASKED and scores.slopes is None:
        # Kernels know whole rectangles and triangles.
        return None, None
    queries, keys = _positions(task)
    mask = empty = None
    if task.kind != FULL:
        seen = torch.from_numpy(scores.rule.visible(queries, keys)).to(device)
        if not bool(seen.all()):
            mask = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))
            empty = ~seen.any(1)
    if scores.slopes is not None:
        distance = torch.from_numpy(np.abs(queries[:, None] - keys[None, :])).to(device, torch.float32)
        bias = -scores.slopes.view(-1, 1, 1) * distance
        mask = bias if mask is None else bias + mask
    if mask is None:
        return None, None
    return mask.view(1, -1, *mask.shape[-2:]), empty


def _positions(task: Task) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = task.rows[1] - task.rows[0], task.columns[1] - task.columns[0]
    return np.arange(task.origin[0], task.origin[0] + rows), np.arange(
        task.origin[1], task.origin[1] + columns
    )


def _keeping(task: Task, scores: Scores, samples: int, device: torch.device) -> Tensor | None:
    if scores.dropout is None:
        return None
    assert scores.heads is not None
    queries, keys = (torch.from_numpy(numbers).to(device) for numbers in _positions(task))
    return scores.dropout.kept(scores.heads.to(device), samples, queries, keys)


class Merger:
    """Joins the results of blocks, each over other keys, into one attention; float32 throughout."""

    def __init__(self, query: Tensor, value_width: int) -> None:
        """Start with rows that have seen nothing.

        Args:
            query: ``[b, n, s, d]``.
            value_width: width of values.
        """
        wide = torch.promote_types(query.dtype, torch.float32)
        self.output = query.new_zeros(*query.shape[:3], value_width, dtype=wide)
        self.logsum = query.new_full(query.shape[:3], float("-inf"), dtype=wide)

    def add(self, samples: slice, rows: tuple[int, int], output: Tensor, logsum: Tensor) -> None:
        """Join a block: ``[b, n, q, dv]`` and ``[b, n, q]``, minus infinity for rows that saw nothing."""
        place = (samples, slice(None), slice(*rows))
        before = self.logsum[place]
        total = torch.logaddexp(before, logsum.to(before.dtype))
        weight = torch.exp(logsum.to(before.dtype) - total).nan_to_num_(0.0)
        mine = self.output[place]
        # Interpolation leaves rows alone that saw nothing in this block.
        mine.lerp_(output.to(mine.dtype), weight.unsqueeze(-1))
        before.copy_(total)


def attend(
    merger: Merger,
    samples: slice,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tasks: tuple[Task, ...],
    scores: Scores,
) -> None:
    """Compute tasks and join them to what was seen before."""
    query, key, value = query[samples], key[samples], value[samples]
    for task in tasks:
        for block in _row_blocks(task, scores):
            q = query[:, :, slice(*block.rows)]
            k, v = key[:, :, slice(*block.columns)], value[:, :, slice(*block.columns)]
            merger.add(samples, block.rows, *_forward(q, k, v, block, scores))


def attend_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    samples: slice,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsum: Tensor,
    outer: Tensor,
    tasks: tuple[Task, ...],
    scores: Scores,
) -> None:
    """Add the gradients of tasks, given the whole attention's results."""
    for task in tasks:
        for block in _row_blocks(task, scores):
            rows, columns = slice(*block.rows), slice(*block.columns)
            place, held = (samples, slice(None), rows), (samples, slice(None), columns)
            found = _backward(
                outer[place],
                query[place],
                key[held],
                value[held],
                output[place],
                logsum[place],
                block,
                scores,
            )
            gradients[0][place] += found[0]
            gradients[1][held] += found[1]
            gradients[2][held] += found[2]


def _with_flash(query: Tensor, scores: Scores) -> bool:
    return query.device.type == "cpu" and scores.dropout is None and query.dtype != torch.float16


def _forward(q: Tensor, k: Tensor, v: Tensor, task: Task, scores: Scores) -> tuple[Tensor, Tensor]:
    added, empty = _added(task, scores, q.device)
    causal = task.kind == CAUSAL and added is None
    if _with_flash(q, scores):
        mask = None if added is None else added.to(q.dtype)
        output, logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, _padded(v, q), 0.0, causal, attn_mask=mask, scale=scores.scale
        )
        output = output[..., : v.shape[-1]]
    else:
        products = _products(q, k, added, causal, scores)
        logsum = torch.logsumexp(products, -1)
        weights = torch.exp(products - logsum.unsqueeze(-1)).nan_to_num_(0.0)
        kept = _keeping(task, scores, q.shape[0], q.device)
        if kept is not None and scores.dropout is not None:
            weights = weights * kept / (1.0 - scores.dropout.probability)
        output = weights @ _repeated(v, q).to(weights.dtype)
    if empty is not None:
        # The flash kernel says 0 for rows without keys, which would count as one key.
        logsum = logsum.masked_fill(empty, float("-inf"))
        output = output.masked_fill(empty.unsqueeze(-1), 0.0)
    return output, logsum


def _backward(
    outer: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsum: Tensor,
    task: Task,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    added, _ = _added(task, scores, q.device)
    causal = task.kind == CAUSAL and added is None
    # Rows that see nothing at all have no log-sum: any number will do, their weights are zero.
    logsum = logsum.masked_fill(logsum.isinf(), 0.0)
    if _with_flash(q, scores):
        mask = None if added is None else added.to(q.dtype)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _padded(outer, q).contiguous(),
            q,
            k,
            _padded(v, q),
            _padded(output, q).to(q.dtype).contiguous(),
            logsum.contiguous(),
            0.0,
            causal,
            attn_mask=mask,
            scale=scores.scale,
        )
        return dq, dk, dv[..., : v.shape[-1]]
    products = _products(q, k, added, causal, scores)
    weights = torch.exp(products - logsum.unsqueeze(-1).to(products.dtype))
    wide, outer_wide = weights.dtype, outer.to(weights.dtype)
    kept = _keeping(task, scores, q.shape[0], q.device)
    dweights = outer_wide @ _repeated(v, q).to(wide).transpose(-1, -2)
    used = weights
    if kept is not None and scores.dropout is not None:
        factor = kept / (1.0 - scores.dropout.probability)
        used, dweights = weights * factor, dweights * factor
    delta = (outer_wide * output.to(wide)).sum(-1, keepdim=True)
    dproducts = weights * (dweights - delta) * scores.scale
    dq = dproducts @ _repeated(k, q).to(wide)
    dk = _summed(dproducts.transpose(-1, -2) @ q.to(wide), k)
    dv = _summed(used.transpose(-1, -2) @ outer_wide, v)
    return dq, dk, dv


def _products(q: Tensor, k: Tensor, added: Tensor | None, causal: bool, scores: Scores) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    products = (q.to(wide) @ _repeated(k, q).to(wide).transpose(-1, -2)) * scores.scale
    if added is not None:
        return products + added.to(wide)
    if causal:
        later = torch.ones(products.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        return products.masked_fill(later, float("-inf"))
    return products


def _repeated(tensor: Tensor, like: Tensor) -> Tensor:
    """Key heads, each as often as query heads share it."""
    times = like.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    """Gradients of repeated heads, summed."""
    if gradient.shape[1] == like.shape[1]:
        return gradient
    return gradient.view(like.shape[0], like.shape[1], -1, *gradient.shape[2:]).sum(2)


def _padded(tensor: Tensor, like: Tensor) -> Tensor:
    """Zeros behind the last dimension up to the width of queries, which the flash kernel wants everywhere."""
    missing = like.shape[-1] - tensor.shape[-1]
    return tensor if missing <= 0 else torch.nn.functional.pad(tensor, (0, missing))

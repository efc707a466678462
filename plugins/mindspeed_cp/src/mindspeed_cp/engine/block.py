"""Tasks computed by block kernels and joined with what was seen before."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from mindspeed_cp.engine.kernels.choice import kernel_for
from mindspeed_cp.engine.kernels.contract import BackwardBlock, BlockKernel
from mindspeed_cp.engine.kernels.rows import part_shape
from mindspeed_cp.engine.merging import Merger
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import Task
from mindspeed_megatron.equal_blocks import run_blocks

Work = tuple[tuple[slice, tuple[Task, ...], Scores], ...]
"""Samples that share a mask rule, the tasks in their local rows, and scale, mask rule, bias and dropout."""


def _parts(kernel: BlockKernel, task: Task, scores: Scores, heads: int) -> Iterable[Task]:
    return run_blocks(kernel.parts(task, scores, heads), lambda part: part_shape(part, scores))


def attend(merger: Merger, query: Tensor, key: Tensor, value: Tensor, work: Work) -> None:
    """Compute work and join it to what was seen before.

    Args:
        merger: joins results.
        query: ``[b, n, s, d]``, rows of all samples.
        key: ``[b, g, t, d]``, ``g`` divides ``n``.
        value: ``[b, g, t, dv]``.
        work: what is computed.
    """
    for samples, tasks, scores in work:
        queries, keys, values = query[samples], key[samples], value[samples]
        heads = queries.shape[0] * queries.shape[1]
        for task in tasks:
            kernel = kernel_for(queries, keys, values, task, scores)
            for part in _parts(kernel, task, scores, heads):
                q = queries[:, :, slice(*part.rows)]
                k, v = keys[:, :, slice(*part.columns)], values[:, :, slice(*part.columns)]
                merger.add(samples, part.rows, *kernel.forward(q, k, v, part, scores))


def attend_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsum: Tensor,
    outer: Tensor,
    work: Work,
) -> None:
    """Add the gradients of work, given the whole attention's results.

    Shapes are those of `attend`; ``output`` and its gradient ``outer`` are ``[b, n, s, dv]``, ``logsum`` is
    ``[b, n, s]``.
    """
    if not work:
        return
    # Rows that see nothing at all have no log-sum: any number will do, their weights are zero.
    logsum = logsum.masked_fill(logsum.isinf(), 0.0)
    for samples, tasks, scores in work:
        heads = len(range(*samples.indices(query.shape[0]))) * query.shape[1]
        for task in tasks:
            kernel = kernel_for(query, key, value, task, scores)
            for part in _parts(kernel, task, scores, heads):
                rows = (samples, slice(None), slice(*part.rows))
                columns = (samples, slice(None), slice(*part.columns))
                tensors = outer[rows], query[rows], key[columns], value[columns], output[rows], logsum[rows]
                found = kernel.backward(BackwardBlock(*tensors, part, scores))
                for total, place, part_of_it in zip(gradients, (rows, columns, columns), found):
                    total[place] += part_of_it

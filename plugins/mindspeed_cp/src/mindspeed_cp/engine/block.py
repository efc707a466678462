"""Tasks computed by block kernels and joined with what was seen before."""

from __future__ import annotations

from torch import Tensor

from mindspeed_cp.engine.kernels.choice import kernel_for
from mindspeed_cp.engine.merging import Merger
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import Task


def attend(
    merger: Merger,
    samples: slice,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tasks: tuple[Task, ...],
    scores: Scores,
) -> None:
    """Compute tasks and join them to what was seen before.

    Args:
        merger: joins results.
        samples: which samples the tasks are for.
        query: ``[b, n, s, d]``, rows of all samples.
        key: ``[b, g, t, d]``, ``g`` divides ``n``.
        value: ``[b, g, t, dv]``.
        tasks: in local rows.
        scores: scale, mask rule, bias, dropout.
    """
    query, key, value = query[samples], key[samples], value[samples]
    heads = query.shape[0] * query.shape[1]
    for task in tasks:
        kernel = kernel_for(query, key, value, task, scores)
        for part in kernel.parts(task, scores, heads):
            q = query[:, :, slice(*part.rows)]
            k, v = key[:, :, slice(*part.columns)], value[:, :, slice(*part.columns)]
            merger.add(samples, part.rows, *kernel.forward(q, k, v, part, scores))


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
    """Add the gradients of tasks, given the whole attention's results.

    Args:
        gradients: of queries, keys and values, to add to.
        samples: as in forward, like ``query``, ``key``, ``value``, ``tasks`` and ``scores``.
        query: see there.
        key: see there.
        value: see there.
        output: ``[b, n, s, dv]``.
        logsum: ``[b, n, s]``.
        outer: ``[b, n, s, dv]``, gradient of the output.
        tasks: see there.
        scores: see there.
    """
    if not tasks:
        return
    heads = len(range(*samples.indices(query.shape[0]))) * query.shape[1]
    # Rows that see nothing at all have no log-sum: any number will do, their weights are zero.
    logsum = logsum.masked_fill(logsum.isinf(), 0.0)
    for task in tasks:
        kernel = kernel_for(query, key, value, task, scores)
        for part in kernel.parts(task, scores, heads):
            rows, columns = slice(*part.rows), slice(*part.columns)
            place, held = (samples, slice(None), rows), (samples, slice(None), columns)
            found = kernel.backward(
                outer[place],
                query[place],
                key[held],
                value[held],
                output[place],
                logsum[place],
                part,
                scores,
            )
            gradients[0][place] += found[0]
            gradients[1][held] += found[1]
            gradients[2][held] += found[2]

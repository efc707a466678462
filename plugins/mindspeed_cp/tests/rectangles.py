"""Rectangles of scores under every kind of mask, and a kernel held against their definition in float64."""

import numpy as np
import torch

from mindspeed_cp.engine.block import attend, attend_backward
from mindspeed_cp.engine.kernels import (
    using,
)
from mindspeed_cp.engine.local import zeros_for
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.merging import Merger
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import tasks

WHOLE = 40
MATRIX = np.random.default_rng(3).random((WHOLE, WHOLE)) < 0.3
MATRIX[12:15] = False
# Rules, with queries and keys of a rectangle.
RECTANGLES = {
    "triangle": (MaskRule(WHOLE), (10, 30), (10, 30)),
    "rectangle": (MaskRule(WHOLE), (20, 40), (0, 13)),
    "rectangle and triangle": (MaskRule(WHOLE), (8, 40), (0, 40)),
    "band": (MaskRule(WHOLE, window=6), (10, 40), (5, 40)),
    "band ahead": (MaskRule(WHOLE, causal=False, window=5), (10, 40), (5, 37)),
    "small documents": (MaskRule(WHOLE, ends=(7, 31, WHOLE), window=4), (0, 40), (0, 40)),
    "given": (MaskRule(WHOLE, causal=False, matrix=MATRIX), (5, 40), (0, 38)),
    "given and causal": (MaskRule(WHOLE, matrix=MATRIX), (5, 40), (0, 38)),
}


def definition(q, k, v, rule, queries, keys, options):
    """Scores ``[b, n, q, k]`` of a rectangle, in float64, and values of all query heads."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    i, j = np.arange(*queries), np.arange(*keys)
    scores = q @ k.transpose(-1, -2) * options.scale
    if options.slopes is not None:
        distance = torch.from_numpy(np.abs(i[:, None] - j[None])).double()
        distance = distance.sqrt() if options.root else distance
        scores = scores - options.slopes.double().view(-1, 1, 1) * distance
    return scores.masked_fill(~torch.from_numpy(rule.visible(i, j)), float("-inf")), v


def compare(kernel, rule, queries, keys, dtype, tolerance, *, heads=4, key_heads=2, value_width=8, **given_):
    """A rectangle by a kernel against the definition: results, and gradients for given numbers."""
    torch.manual_seed(0)
    device = kernel.devices[0] if kernel.devices[0] == "cuda" else "cpu"
    wide = {"dtype": torch.float64}
    q, outer = (torch.randn(2, heads, queries[1] - queries[0], w, **wide) for w in (8, value_width))
    k, v = (torch.randn(2, key_heads, keys[1] - keys[0], w, **wide) for w in (8, value_width))
    scores = Scores(0.35, rule, heads=torch.arange(heads), **given_)
    wanted, values = definition(q, k, v, rule, queries, keys, scores)
    # As if the rows saw further keys elsewhere.
    elsewhere, output = torch.randn(wanted.shape[:3], **wide), torch.randn(outer.shape, **wide)
    logsum = torch.logaddexp(torch.logsumexp(wanted, -1), elsewhere)
    weights = (wanted - logsum.unsqueeze(-1)).exp()
    inner = weights * (outer @ values.transpose(-1, -2) - (outer * output).sum(-1, keepdim=True)) * 0.35
    share = heads // key_heads
    expected = (
        (torch.softmax(wanted, -1).nan_to_num(0.0) @ values),
        torch.logsumexp(wanted, -1),
        inner @ k.repeat_interleave(share, 1),
        (inner.transpose(-1, -2) @ q).unflatten(1, (key_heads, share)).sum(2),
        (weights.transpose(-1, -2) @ outer).unflatten(1, (key_heads, share)).sum(2),
    )
    mine = [tensor.to(device, dtype) for tensor in (q, k, v)]
    work = tasks(rule, ((0, queries),), ((0, keys),), positions=scores.positional)
    with using(kernel):
        merger = Merger(mine[0], value_width)
        attend(merger, *mine, ((slice(0, 2), work, scores),))
        grads = zeros_for(*mine)
        facts = output.to(device, dtype), logsum.float().to(device), outer.to(device, dtype)
        attend_backward(grads, *mine, *facts, ((slice(0, 2), work, scores),))
    empty = expected[1].isinf()
    assert torch.equal(merger.logsum.isinf().cpu(), empty)
    for got, want in zip((merger.output, merger.logsum.masked_fill(empty.to(device), 0.0), *grads),
                         (expected[0], expected[1].masked_fill(empty, 0.0), *expected[2:])):  # fmt: skip
        assert (got.double().cpu() - want).norm() / want.norm() < tolerance
    return work

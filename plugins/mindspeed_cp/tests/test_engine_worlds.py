"""The engine on two and four ranks against one process in float64: outputs and gradients."""

import itertools

import pytest
import torch
import torch.distributed as dist

from mindspeed_core.testing import run_world
from mindspeed_cp.engine.attention import Members, Options, split_attention
from mindspeed_cp.engine.block import Dropout
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import GATHER, RING, Grid, layout_of

LENGTH = 48


def dense(query, key, value, rules, options):
    """The definition, on one process, with a score matrix."""
    share = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = query @ keys.transpose(-1, -2) * options.scale
    position = torch.arange(query.shape[2])
    if options.slopes is not None:
        scores = scores - options.slopes.view(1, -1, 1, 1) * (position[:, None] - position[None]).abs()
    seen = torch.stack([torch.from_numpy(rule.visible(position.numpy(), position.numpy())) for rule in rules])
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    if options.dropout is not None:
        kept = options.dropout.kept(torch.arange(query.shape[1]), query.shape[0], position, position)
        weights = weights * kept / (1 - options.dropout.probability)
    return weights @ values


RULES = {
    "causal": lambda n: (MaskRule(n),),
    "full": lambda n: (MaskRule(n, causal=False),),
    "window": lambda n: (MaskRule(n, window=7),),
    "documents": lambda n: (MaskRule(n, ends=(5, 6, 29, n)), MaskRule(n, ends=(20, n))),
    "prefix": lambda n: (MaskRule(n, prefix=11),),
}


def grids(ranks):
    yield "ring", Grid(ranks)
    yield "ring-contiguous", Grid(ranks, layout="contiguous")
    yield "ulysses", Grid(1, ranks)
    yield "gather", Grid(ranks, method=GATHER)
    if ranks == 4:
        yield "double-ring", Grid(4, window=2)
        yield "hybrid", Grid(2, 2)
        yield "hybrid-gather", Grid(2, 2, GATHER)


def members_of(grid):
    rank = dist.get_rank()
    found = {}
    for name, lists in (("inner", grid.inner_ranks()), ("outer", grid.outer_ranks())):
        for ranks in lists:
            group = dist.new_group(ranks)
            if rank in ranks and len(ranks) > 1:
                found[name] = group
    return Members(rank, **found)


def check(grid, members, rules, heads, key_heads, length, dtype=torch.float64, tolerance=1e-9, **given):
    torch.manual_seed(0)
    width, value_width = 8, 6 if given.pop("narrow", False) else 8
    query, outer = (torch.randn(2, heads, length, w, dtype=torch.float64) for w in (width, value_width))
    key = torch.randn(2, key_heads, length, width, dtype=torch.float64)
    value = torch.randn(2, key_heads, length, value_width, dtype=torch.float64)
    options = Options(width**-0.5, **given)
    whole = [t.clone().requires_grad_() for t in (query, key, value)]
    expected = dense(*whole, rules if len(rules) > 1 else rules * 2, options)
    expected.backward(outer)
    position = torch.from_numpy(layout_of(grid, rules).positions(members.rank))
    mine = [t[:, :, position].to(dtype).requires_grad_() for t in (query, key, value)]
    output = split_attention(*mine, rules, grid, members, options)
    output.backward(outer[:, :, position].to(dtype))
    for got, want in zip((output, *(t.grad for t in mine)), (expected, *(t.grad for t in whole))):
        want = want[:, :, position]
        error = (got.double() - want).norm() / want.norm()
        assert error < tolerance, (float(error), grid, rules)


def every_algorithm(ranks):
    dist.init_process_group("gloo")
    for _, grid in grids(ranks):
        members = members_of(grid)
        for rule, (heads, key_heads) in itertools.product(RULES.values(), ((4, 4), (4, 2))):
            check(grid, members, rule(LENGTH), heads, key_heads, LENGTH)
        check(grid, members, RULES["causal"](LENGTH + 5), 4, 1, LENGTH + 5)
        check(grid, members, RULES["documents"](LENGTH + 5), 5, 5, LENGTH + 5)
        check(grid, members, RULES["causal"](LENGTH), 6, 3, LENGTH, narrow=True)
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
        check(grid, members, RULES["causal"](LENGTH), 4, 2, LENGTH, slopes=slopes)
        check(grid, members, RULES["documents"](LENGTH), 4, 2, LENGTH, dropout=Dropout(0.2, 77))
        check(grid, members, RULES["causal"](LENGTH), 4, 2, LENGTH, dtype=torch.float32, tolerance=1e-6)
        check(grid, members, RULES["causal"](LENGTH), 4, 2, LENGTH, dtype=torch.bfloat16, tolerance=8e-3)
        if grid.method == RING and grid.outer > 1:
            for kept in ("keys", "all"):
                check(grid, members, RULES["causal"](LENGTH), 4, 2, LENGTH, kept=kept)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_algorithm_equals_one_process(ranks):
    run_world(every_algorithm, ranks, ranks)

"""The engine on two and four ranks against one process in float64: outputs and gradients."""

import itertools

import pytest
import torch
import torch.distributed as dist

from mindspeed_cp.engine import counters
from mindspeed_cp.engine.attention import CallOptions, Members, split_attention
from mindspeed_cp.engine.exchange import exchange, needed_rows
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import GATHER, RING, Grid, layout_of, outer_layout
from mindspeed_cp.engine.ring import RingPlan, Transfers
from mindspeed_cp.engine.ring_table import ring_table
from mindspeed_cp.engine.scores import Dropout
from mindspeed_cp.engine.volume import Sizes, share_of
from mindspeed_cp.options import CPOptions
from mindspeed_megatron.instruments.communication import count_communication
from mindspeed_megatron.instruments.memory import TensorBytes
from mindspeed_testing import run_world

LENGTH = 48


def dense(query, key, value, rules, options):
    """Compute attention on one process with a score matrix."""
    share = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = query @ keys.transpose(-1, -2) * options.scale
    position = torch.arange(query.shape[2])
    if options.slopes is not None:
        distance = (position[:, None] - position[None]).abs().double()
        distance = distance.sqrt() if options.root else distance
        scores = scores - options.slopes.double().view(1, -1, 1, 1) * distance
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
    if grid.method == RING and grid.outer == dist.get_world_size():
        found["second"] = dist.new_group()
    for name, lists in (("inner", grid.inner_ranks()), ("outer", grid.outer_ranks())):
        for ranks in lists:
            group = dist.new_group(ranks)
            if rank in ranks and len(ranks) > 1:
                found[name] = group
    return Members(rank, **found)


def chosen(grid, scale, **given):
    """The options of a run, and those of one call."""
    own = {name: given.pop(name) for name in ("slopes", "root", "dropout", "sink", "kept") if name in given}
    return CPOptions(grid, **given), CallOptions(scale, **own)


def check(grid, members, rules, heads, key_heads, length, dtype=torch.float64, tolerance=1e-9, **given):
    torch.manual_seed(0)
    width, value_width = 8, 6 if given.pop("narrow", False) else 8
    query, outer = (torch.randn(2, heads, length, w, dtype=torch.float64) for w in (width, value_width))
    key = torch.randn(2, key_heads, length, width, dtype=torch.float64)
    value = torch.randn(2, key_heads, length, value_width, dtype=torch.float64)
    options, call = chosen(grid, width**-0.5, **given)
    whole = [t.clone().requires_grad_() for t in (query, key, value)]
    expected = dense(*whole, rules if len(rules) > 1 else rules * 2, call)
    expected.backward(outer)
    position = torch.from_numpy(layout_of(grid, rules).positions(members.rank))
    mine = [t[:, :, position].to(dtype).requires_grad_() for t in (query, key, value)]
    output = split_attention(*mine, rules, members, options, call)
    output.backward(outer[:, :, position].to(dtype))
    for got, want in zip((output, *(t.grad for t in mine)), (expected, *(t.grad for t in whole))):
        want = want[:, :, position]
        error = (got.double() - want).norm() / want.norm()
        assert error < tolerance, (float(error), grid, rules)


def sent_by_one_attention(grid, members, rule, heads, key_heads, **given):
    """Bytes that this rank sends for one attention in float32, forward and backward."""
    position = layout_of(grid, rule).positions(members.rank)
    tensors = [torch.randn(2, n, len(position), 8, requires_grad=True) for n in (heads, key_heads, key_heads)]
    options, call = chosen(grid, 1.0, **given)
    with count_communication() as log, counters.counting() as counted:
        split_attention(*tensors, rule, members, options, call).sum().backward()
    assert sum(counted.sent.values()) == log.sent_bytes()
    planned = share_of(options, rule, Sizes(2, heads, key_heads, 8, 8, bytes=4), members.rank, call.kept)
    assert planned.forward.keys() | planned.backward.keys() == counted.sent.keys()
    assert planned.sent == log.sent_bytes()
    assert (planned.pairs, planned.tokens) == (counted.pairs, len(position))
    return log.sent_bytes()


def check_bytes(name, grid, members):
    """Compare the bytes that are sent to the published formula."""
    causal, heads, key_heads = RULES["causal"](LENGTH), 4, 2
    row = 2 * 8 * 4 * LENGTH // grid.ranks
    n_q, n_kv = heads * row, key_heads * row
    others = grid.outer - 1
    for rule in RULES.values():
        sent_by_one_attention(grid, members, rule(LENGTH + 5), 5, 5)
    if name == "ring":
        assert sent_by_one_attention(grid, members, causal, heads, key_heads) == 6 * others * n_kv
        kept = sent_by_one_attention(grid, members, causal, heads, key_heads, kept="all")
        assert kept == 4 * others * n_kv
        kept = sent_by_one_attention(grid, members, causal, heads, key_heads, kept="keys")
        assert kept == 5 * others * n_kv
    if name == "ulysses":
        copies = max(1, grid.inner // key_heads)
        formula = 2 * (grid.inner - 1) * (2 * n_q + 2 * copies * n_kv) // grid.inner
        sent = sent_by_one_attention(grid, members, causal, heads, key_heads)
        assert sent == formula if grid.inner <= key_heads else sent <= formula
        # Gathered along the sequence, a single key head costs the same.
        single = [
            sent_by_one_attention(grid, members, causal, heads, 1, gather_keys=gathers)
            for gathers in (False, True)
        ]
        one = n_kv // key_heads
        assert single == [2 * ((grid.inner - 1) * 2 * n_q // grid.inner + 2 * (grid.inner - 1) * one)] * 2
        again = sent_by_one_attention(grid, members, causal, heads, 1, kept="all")
        assert again == single[0] + 2 * (grid.inner - 1) * one
    if name == "gather":
        outer = outer_layout(grid, causal)
        moved = exchange(outer, members.rank, needed_rows(outer, causal))
        foreign = sum(len(rows) for to, rows in enumerate(moved.send) if to != members.rank)
        came = sum(rows for source, rows in enumerate(moved.receive) if source != members.rank)
        token = 2 * 2 * 8 * 4 * key_heads
        sent = sent_by_one_attention(grid, members, causal, heads, key_heads)
        assert sent == 2 * foreign * token + came * token


def check_order(grid, members):
    """The transfer of the next block is posted before the one at hand is computed with."""
    rule = RULES["causal"](LENGTH)
    layout = layout_of(grid, rule)
    tensors = [torch.randn(1, 2, layout.lengths[0], 8, requires_grad=True) for _ in range(3)]
    with counters.counting() as counted:
        output = split_attention(*tensors, rule, members, *chosen(grid, 1.0))
    last = grid.outer - 1
    forward = [("post keys", 0), ("compute", 0)]
    for step in range(1, last):
        forward += [("wait keys", step), ("post keys", step), ("compute", step)]
    assert counted.events == [*forward, ("wait keys", last), ("compute", last)]
    assert counted.tokens == layout.lengths[members.rank]
    assert counted.pairs == sum(rule[0].pairs(part) for part in layout.shares[members.rank])
    with counters.counting() as counted:
        output.sum().backward()
    for step in range(last):
        posted, computed = (counted.events.index((what, step)) for what in ("post keys", "compute"))
        assert posted < computed < counted.events.index(("post gradients", step))


def check_what_is_kept(grid, members):
    """Keys and values from before an exchange take the place of those that several ranks got."""
    rule = RULES["causal"](LENGTH)
    position = layout_of(grid, rule).positions(members.rank)
    tensors = [torch.randn(1, n, len(position), 8, requires_grad=True) for n in (4, 1, 1)]
    alive = {}
    for kept in ("none", "keys", "all"):
        with TensorBytes() as memory:
            output = split_attention(*tensors, rule, members, *chosen(grid, 1.0, kept=kept))
            # The threads of gloo let go of what they sent.
            dist.barrier()
            alive[kept] = memory.alive
        output.sum().backward()
    exchanged = LENGTH * 8 * 4
    assert alive["none"] - alive["keys"] == exchanged
    assert alive["none"] - alive["all"] == 2 * exchanged


def every_algorithm(ranks):
    dist.init_process_group("gloo")
    for name, grid in grids(ranks):
        members = members_of(grid)
        check_bytes(name, grid, members)
        if name == "ulysses":
            check_what_is_kept(grid, members)
            for how in ({"kept": "keys"}, {"kept": "all"}, {"gather_keys": True}):
                check(grid, members, RULES["documents"](LENGTH + 5), 5, 1, LENGTH + 5, **how)
        if name == "ring":
            check_order(grid, members)
        for rule, (heads, key_heads) in itertools.product(RULES.values(), ((4, 4), (4, 2))):
            check(grid, members, rule(LENGTH), heads, key_heads, LENGTH)
        check(grid, members, RULES["causal"](LENGTH + 5), 4, 1, LENGTH + 5)
        check(grid, members, RULES["documents"](LENGTH + 5), 5, 5, LENGTH + 5)
        check(grid, members, RULES["causal"](LENGTH), 6, 3, LENGTH, narrow=True)
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
        check(grid, members, RULES["causal"](LENGTH), 4, 2, LENGTH, slopes=slopes)
        check(grid, members, RULES["documents"](LENGTH), 4, 2, LENGTH, dropout=Dropout(0.2, 77))
        exact = {
            "slopes": torch.tensor([0.3, 0.17, 0.71, 0.05]),
            "dropout": Dropout(0.1, 77),
        }
        check(grid, members, RULES["causal"](LENGTH), 4, 2, LENGTH, tolerance=1e-13, **exact)
        check(grid, members, RULES["causal"](LENGTH), 4, 2, LENGTH, tolerance=1e-13, root=True, **exact)
        check(grid, members, RULES["causal"](LENGTH), 4, 2, LENGTH, dtype=torch.float32, tolerance=1e-6)
        check(grid, members, RULES["causal"](LENGTH), 4, 2, LENGTH, dtype=torch.bfloat16, tolerance=8e-3)
        if grid.method == GATHER:
            for heads, rule in ((6, "causal"), (4, "documents")):
                check(grid, members, RULES[rule](LENGTH + 5), heads, heads // 2, LENGTH + 5, head_groups=2)
            dropped = {"dropout": Dropout(0.2, 77), "slopes": slopes, "head_groups": 4}
            check(grid, members, RULES["causal"](LENGTH), 4, 4, LENGTH, **dropped)
        if grid.method == RING and grid.outer > 1:
            for kept in ("keys", "all"):
                check(grid, members, RULES["causal"](LENGTH), 4, 2, LENGTH, kept=kept)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.thorough), 4])
def test_every_algorithm_equals_one_process(ranks):
    run_world(every_algorithm, ranks, ranks)


def test_nothing_is_received_where_something_is_still_sent_from():
    plan = RingPlan(ring_table(2), 0, (4, 4), ((), ()), None, CPOptions(Grid(2)))
    buffers = dict.fromkeys(range(2), torch.zeros(8))
    with pytest.raises(RuntimeError, match="block 1 would arrive where another is still sent from"):
        Transfers(plan, "keys").post(plan.table.moves, buffers, buffers)

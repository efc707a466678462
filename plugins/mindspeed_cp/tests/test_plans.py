"""Layouts, mask rules, rings and exchanges as pure functions: nothing twice, nothing missing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp.engine import masks, planners, tiles
from mindspeed_cp.engine.exchange import exchange, needed_rows
from mindspeed_cp.engine.head_plan import head_plan
from mindspeed_cp.engine.layout import Layout, assign, contiguous, documents_zigzag, nested, zigzag
from mindspeed_cp.engine.masks import CAUSAL, FULL, MASKED, MaskRule
from mindspeed_cp.engine.planners import (
    GATHER,
    RING,
    Grid,
    balanced_layout,
    imbalance,
    layout_of,
    outer_layout,
    travelling_keys,
)
from mindspeed_cp.engine.ring_table import ring_table
from mindspeed_cp.engine.tasks import tasks

FAST = settings(max_examples=60, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Sequences of a few dozen tokens have many tiles and pieces of windows."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (tiles, masks, planners):
            patch.setattr(module, "TILE", 8)
        patch.setattr(masks, "BAND_ROWS", 8)
        yield


@st.composite
def rules(draw, longest=64):
    length = draw(st.integers(8, longest))
    kind = draw(st.sampled_from(["plain", "documents", "prefix", "matrix"]))
    given_rule = {"causal": draw(st.booleans())}
    if kind == "documents":
        inner = draw(st.lists(st.integers(1, length - 1), unique=True, max_size=6))
        given_rule["ends"] = (*sorted(inner), length)
    if kind == "prefix":
        given_rule |= {"causal": True, "prefix": draw(st.integers(1, length))}
    if kind == "matrix":
        seed = draw(st.integers(0, 99))
        given_rule["matrix"] = np.random.default_rng(seed).random((length, length)) < 0.7
    if kind != "prefix" and draw(st.booleans()):
        given_rule["window"] = draw(st.integers(0, length))
    return MaskRule(length, **given_rule)


@st.composite
def layouts(draw):
    length, ranks = draw(st.integers(8, 70)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["contiguous", "zigzag", "documents", "balanced", "nested"]))
    if kind == "contiguous":
        return contiguous(length, ranks)
    if kind == "zigzag":
        return zigzag(length, ranks)
    if kind == "documents":
        ends = sorted(draw(st.lists(st.integers(1, length - 1), unique=True, max_size=4)))
        return documents_zigzag([*ends, length], ranks)
    if kind == "balanced":
        return balanced_layout([draw(rules())], ranks, draw(st.integers(0, 2)), regroup=draw(st.booleans()))
    return nested(zigzag(length, ranks), draw(st.integers(1, 3)))


@FAST
@given(layouts())
def test_a_layout_is_a_permutation_with_its_inverse(layout):
    assert sorted(layout.order) == list(range(layout.length))
    assert sum(layout.lengths) == layout.length


def test_shares_that_overlap_or_leave_gaps_are_refused():
    with pytest.raises(ValueError, match="every position once"):
        Layout((((0, 3),), ((2, 5),)))


@FAST
@given(rules(), st.data())
def test_every_visible_score_of_a_rectangle_is_computed_exactly_once(rule, data):
    def interval():
        low = data.draw(st.integers(0, rule.length - 1))
        return low, data.draw(st.integers(low + 1, rule.length))

    queries, keys = interval(), interval()
    computed = np.zeros((rule.length, rule.length), dtype=int)
    everything = np.arange(rule.length)
    seen = rule.visible(everything, everything)
    for piece in rule.pieces(queries, keys):
        (a, b), (c, d) = piece.queries, piece.keys
        if piece.kind == FULL:
            computed[a:b, c:d] += 1
        elif piece.kind == CAUSAL:
            assert (a, b) == (c, d)
            computed[a:b, c:d] += np.tril(np.ones((b - a, d - c), dtype=int))
        else:
            computed[a:b, c:d] += seen[a:b, c:d]
    wanted = np.zeros_like(computed)
    wanted[slice(*queries), slice(*keys)] = seen[slice(*queries), slice(*keys)]
    assert (computed == wanted).all()
    assert rule.pairs(queries, keys) == wanted.sum()


@st.composite
def grids(draw):
    ranks = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["auto", "zigzag", "contiguous", "balanced"]))
    method = draw(st.sampled_from([RING, GATHER]))
    return Grid(ranks, draw(st.integers(1, 2)), method, layout=kind, regroup=draw(st.booleans()))


@FAST
@given(rules(), grids())
def test_tasks_of_all_ranks_cover_every_visible_score_once(rule, grid):
    layout = outer_layout(grid, (rule,))
    everything = np.arange(rule.length)
    seen = rule.visible(everything, everything)
    computed = np.zeros((rule.length, rule.length), dtype=int)
    for rank in range(grid.outer):
        for block in range(grid.outer):
            rows, columns = layout.positions(rank), layout.positions(block)
            for task in tasks(rule, layout.chunks(rank), layout.chunks(block)):
                i, j = rows[slice(*task.rows)], columns[slice(*task.columns)]
                if task.kind == FULL:
                    part = np.ones((len(i), len(j)), dtype=int)
                elif task.kind == CAUSAL:
                    part = np.tril(np.ones((len(i), len(j)), dtype=int))
                else:
                    part = rule.visible(i, j)
                computed[np.ix_(i, j)] += part
    assert (computed == seen).all()


@FAST
@given(rules())
def test_beside_what_counts_at_most_blocks_of_the_kernel_are_computed(rule):
    everything, block = np.arange(rule.length), masks.BAND_ROWS
    seen = rule.visible(everything, everything)
    for piece in rule.pieces((0, rule.length), (0, rule.length)):
        if piece.kind != MASKED:
            continue
        (a, b), (c, d) = piece.queries, piece.keys
        assert seen[a:b, c:d].any() or rule.matrix is not None
        if rule.matrix is None:
            if rule.ends and d - c <= block and b - a <= block:
                # Several small documents together.
                continue
            # A piece of a window is as wide as what its queries see, and one block.
            width = max(np.flatnonzero(row[c:d])[-1] - np.flatnonzero(row[c:d])[0] + 1 for row in seen[a:b])
            assert b - a <= max(block, rule.window // 8)
            assert d - c <= width + b - a
        else:
            for row in range(a, b, block):
                for column in range(c, d, block):
                    i, j = row // block * block, column // block * block
                    assert rule.matrix[i : i + block, j : j + block].any()


@FAST
@given(rules(), grids())
def test_every_rank_makes_the_same_plan_from_the_same_batch(rule, grid):
    def plan(mask):
        layout_of.cache_clear(), outer_layout.cache_clear()
        layout = layout_of(grid, (mask,))
        return layout, needed_rows(outer_layout(grid, (mask,)), [mask])

    matrix = None if rule.matrix is None else rule.matrix.copy()
    again = MaskRule(rule.length, rule.causal, rule.ends, rule.window, rule.prefix, matrix)
    assert rule == again
    assert hash(rule) == hash(again)
    assert plan(rule) == plan(again)


@FAST
@given(rules())
def test_scores_of_rows_are_counted_without_looking_at_each(rule):
    everything = np.arange(rule.length)
    seen = rule.visible(everything, everything)
    assert (rule.row_scores == seen.sum(1)).all()
    assert (rule.work(8) >= seen.sum(1)).all()


@FAST
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_chunks_are_dealt_out_evenly_and_no_rank_has_more_than_the_heaviest_above_the_mean(some, ranks):
    weights = some * ranks
    owned = assign(weights, ranks)
    assert sorted(index for share in owned for index in share) == list(range(len(weights)))
    assert {len(share) for share in owned} == {len(some)}
    loads = [sum(weights[index] for index in share) for share in owned]
    assert max(loads) - min(loads) <= max(weights)


@FAST
@given(rules(), st.integers(1, 4))
def test_a_balanced_layout_is_never_less_even_than_consecutive_parts(rule, ranks):
    found = balanced_layout([rule], ranks, tile=1)
    assert imbalance(found, [rule]) <= imbalance(contiguous(rule.length, ranks), [rule]) + 1e-9
    assert max(found.lengths) - min(found.lengths) <= 16


def test_a_causal_zigzag_needs_one_call_for_each_step_of_the_ring():
    layout, rule = zigzag(64, 4), MaskRule(64)
    for rank in range(4):
        for block in range(4):
            assert len(tasks(rule, layout.chunks(rank), layout.chunks(block))) == 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_causal_zigzag_gives_every_rank_the_same_work(ranks):
    layout, rule = zigzag(64 * ranks, ranks), MaskRule(64 * ranks)
    work = [sum(rule.pairs(interval) for interval in share) for share in layout.shares]
    assert len(set(work)) == 1
    assert sum(work) == 64 * ranks * (64 * ranks + 1) // 2


@FAST
@given(rules(), st.integers(1, 4))
def test_an_exchange_brings_exactly_the_needed_rows_in_order(rule, ranks):
    layout = outer_layout(Grid(ranks, method=GATHER), (rule,))
    needed = needed_rows(layout, [rule])
    plans = [exchange(layout, rank, needed) for rank in range(ranks)]
    everything = np.arange(rule.length)
    seen = rule.visible(everything, everything)
    for rank, plan in enumerate(plans):
        arrived = np.concatenate([layout.positions(s)[plans[s].send[rank]] for s in range(ranks)])
        assert [len(plans[s].send[rank]) for s in range(ranks)] == list(plan.receive)
        wanted = np.concatenate([np.arange(*i) for i in needed[rank]] or [np.empty(0, int)])
        assert (arrived[plan.order] == wanted).all()
        must = np.flatnonzero(seen[layout.positions(rank)].any(0))
        assert set(must) <= set(wanted)


@pytest.mark.parametrize(
    ("ranks", "window"), [(n, w) for n in range(1, 17) for w in range(1, n + 1) if n % w == 0]
)
def test_every_rank_of_a_ring_meets_every_block_once_and_gets_it_in_time(ranks, window):
    table = ring_table(ranks, window)
    assert all(sorted(held) == list(range(ranks)) for held in table.hold)
    assert all(sorted(step[rank] for step in table.hold) == list(range(ranks)) for rank in range(ranks))
    assert list(table.hold[0]) == list(range(ranks))
    for move in table.moves:
        assert table.hold[move.post][move.source] == move.block
        assert table.hold[move.arrive][move.target] == move.block
    arrivals = {(move.target, move.arrive) for move in table.moves}
    assert arrivals == {(rank, step) for rank in range(ranks) for step in range(1, ranks)}
    crossing = [move for move in table.moves if move.outer]
    assert len(crossing) == (ranks // window - 1) * ranks * (window > 1)
    assert all(move.arrive - move.post == window for move in crossing)


def test_gradients_end_at_their_owners():
    table = ring_table(8, 4)
    for block in range(8):
        place = table.holder(7, block)
        for step in range(7):
            move = next(m for m in table.backward_moves if m.post == step and m.block == block)
            assert move.source == place
            place = move.target
        assert place == block


@FAST
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6))
def test_heads_are_split_evenly_and_meet_their_keys(share, key_heads, ranks):
    heads = share * key_heads
    if heads < ranks:
        with pytest.raises(ValueError, match="cannot be split over"):
            head_plan(heads, key_heads, ranks, 0)
        return
    for rank in range(ranks):
        plan = head_plan(heads, key_heads, ranks, rank)
        assert [head for part in plan.queries for head in part] == list(range(heads))
        assert max(map(len, plan.queries)) - min(map(len, plan.queries)) <= 1
        mine, keys = plan.queries[rank], plan.keys[rank]
        if plan.expand:
            found = [keys[place] for place in plan.expand]
        else:
            found = [keys[place // (len(mine) // len(keys))] for place in range(len(mine))]
        assert found == [head // share for head in mine]


def test_hybrid_shares_are_consecutive_pieces_of_the_rings():
    grid, rule = Grid(2, 2), (MaskRule(32),)
    outer, whole = outer_layout(grid, rule), layout_of(grid, rule)
    for place in range(2):
        pieces = np.concatenate([whole.positions(place * 2 + inner) for inner in range(2)])
        assert (pieces == outer.positions(place)).all()
    assert grid.inner_ranks() == [[0, 1], [2, 3]]
    assert grid.outer_ranks() == [[0, 2], [1, 3]]


def test_a_zigzag_in_every_document_moves_what_each_document_would_move_alone():
    whole = travelling_keys(documents_zigzag((16, 48), 2), [MaskRule(48, ends=(16, 48))])
    alone = [travelling_keys(zigzag(length, 2), [MaskRule(length)]) for length in (16, 32)]
    assert whole == sum(alone)


def test_consecutive_parts_of_a_sequence_that_does_not_divide_differ_by_one():
    grid, rule = Grid(4, layout="contiguous"), (MaskRule(30, causal=False),)
    assert outer_layout(grid, rule).shares == (((0, 8),), ((8, 16),), ((16, 23),), ((23, 30),))

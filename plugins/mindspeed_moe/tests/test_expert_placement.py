"""Plans of where experts are, and experts that move there during training."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_moe.expert_map.migration import Moves
from mindspeed_moe.expert_map.planning import (
    balance,
    contiguous_placement,
    greedy_placement,
    hot_experts,
    rank_loads,
    rows_with_copies,
)
from mindspeed_moe.features.expert_map_proofs import EIGHT
from mindspeed_moe.features.proofs import EP2
from mindspeed_testing.worlds import run_world


@st.composite
def layouts(draw):
    ranks, slots = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    loads = draw(st.lists(st.integers(0, 50), min_size=ranks * slots, max_size=ranks * slots))
    order = draw(st.permutations(range(ranks * slots)))
    return loads, [order[rank * slots : (rank + 1) * slots] for rank in range(ranks)]


@given(layouts())
def test_a_plan_is_a_permutation_with_equal_slots_and_never_worse(layout):
    loads, now = layout
    plan = greedy_placement(loads, len(now), now)
    assert sorted(expert for experts in plan for expert in experts) == list(range(len(loads)))
    assert {len(experts) for experts in plan} == {len(now[0])}
    assert max(rank_loads(loads, plan)) <= max(rank_loads(loads, now))
    if max(rank_loads(loads, plan)) == max(rank_loads(loads, now)):
        assert plan == [list(experts) for experts in now]


@given(layouts())
def test_an_expert_that_stays_on_its_rank_keeps_its_slot(layout):
    loads, now = layout
    for before, after in zip(now, greedy_placement(loads, len(now), now)):
        for slot, expert in enumerate(before):
            assert expert not in after or after[slot] == expert


@given(layouts(), layouts())
def test_what_ranks_send_is_what_the_others_expect(one, other):
    (_, before), (_, after) = one, other
    if sorted(map(len, before)) != sorted(map(len, after)):
        return
    ranks = range(len(before))
    moves = [Moves(before, after, rank) for rank in ranks]
    for source in ranks:
        for target in ranks:
            sent = [before[source][slot] for slot in moves[source].outgoing[target]]
            assert sent == [after[target][slot] for slot in moves[target].incoming[source]]


def zipf(experts, exponent, seed):
    weights = [1 / (index + 1) ** exponent for index in range(experts)]
    loads = [round(weight / sum(weights) * experts * 10_000) for weight in weights]
    random.Random(seed).shuffle(loads)
    return loads


@pytest.mark.parametrize(
    ("experts", "ranks", "exponent", "greedy", "bound"),
    [
        (64, 8, 0.5, 1.11, 1.00),
        (64, 8, 1.0, 1.88, 1.69),
        (256, 32, 1.0, 5.37, 5.23),
        (256, 64, 0.5, 2.49, 2.09),
        (256, 64, 1.0, 10.57, 10.45),
    ],
)
def test_plans_for_zipf_loads_reach_the_published_balance(experts, ranks, exponent, greedy, bound):
    loads = zipf(experts, exponent, seed=1)
    found = balance(loads, contiguous_placement(experts, ranks), greedy_placement(loads, ranks))
    assert found.after == pytest.approx(greedy, abs=0.05)
    assert found.bound == pytest.approx(bound, abs=0.05)
    assert found.before >= found.after


@given(layouts(), st.integers(0, 4), st.randoms(use_true_random=False))
def test_copies_of_hot_experts_are_never_worse_and_lose_no_row(layout, number, source):
    loads, now = layout
    counts = [[source.randint(0, 9) for _ in loads] for _ in now]
    chosen, rows = hot_experts(counts, number), rows_with_copies(counts, number)
    assert len(set(chosen)) == len(chosen) <= number
    assert sum(rows) == sum(map(sum, counts))
    assert max(rows) <= max(rows_with_copies(counts, 0))


def test_plans_decide_ties_by_index():
    assert greedy_placement([3, 3, 1, 1], 2) == [[0, 2], [1, 3]]
    assert hot_experts([[0, 0, 4, 4], [4, 4, 0, 0]], 1) == []
    assert hot_experts([[9, 0, 0, 0], [9, 9, 0, 0]], 2) == [0]


MOVES = ("--enable-expert-placement", "--expert-placement-freq", "1", "--print-expert-load")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ("--use-distributed-optimizer",)),
        pytest.param(
            4,
            ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_experts_that_move_every_step_train_as_those_that_stay(ranks, flags):
    model = (*EIGHT, *EP2, *flags)
    # Small buffers cut every expert, also at places that divide nothing.
    found = run_world("moved_experts:without_and_with_moves", ranks, model, MOVES, 4, 5000)
    still, (numbers, parameters, moves, largest, placements) = found[0]
    assert numbers == pytest.approx(still[0], rel=1e-6)
    assert set(parameters) == set(still[1])
    for name, tensor in still[1].items():
        torch.testing.assert_close(parameters[name], tensor, rtol=1e-6, atol=1e-7)
    # Two layers after each of four updates.
    assert moves == 8
    assert 0 < largest <= 5000
    assert all(placement != contiguous_placement(8, 2) for placement in placements)
    assert all(moving[4] == placements for _, moving in found)

"""The solver of plans: the optimum where it can be tried out, and plans that hold on every rank."""

from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_memory.policy import knapsack
from mindspeed_memory.policy.costs import (
    ATTENTION,
    NOTHING,
    SWAP,
    WHOLE,
    Costs,
    Measured,
    of_stage,
    plan_of_stage,
)
from mindspeed_memory.policy.knapsack import Form, Group, fastest_plan

FORMS = st.builds(Form, st.just("other"), st.integers(0, 60), st.floats(0, 5))
GROUPS = st.lists(
    st.builds(
        lambda layers, forms: Group(layers, (Form("whole", 0, 6.0), *forms)),
        st.integers(1, 4),
        st.lists(FORMS, max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=3,
)


def exhaustive(groups, budget):
    """Try every choice; return the least time."""
    choices = [combinations_with_replacement(group.forms, group.layers) for group in groups]
    return min(
        sum(form.seconds for forms in plan for form in forms)
        for plan in product(*choices)
        if sum(form.nbytes for forms in plan for form in forms) <= budget
    )


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.integers(0, 400))
def test_plans_are_the_optimum_and_hold_the_budget(groups, budget):
    plan = fastest_plan(groups, budget)
    assert plan.nbytes == sum(form.nbytes for forms in plan.forms for form in forms) <= budget
    assert plan.seconds == pytest.approx(sum(form.seconds for forms in plan.forms for form in forms))
    assert [len(forms) for forms in plan.forms] == [group.layers for group in groups]
    assert plan.seconds == pytest.approx(exhaustive(groups, budget), abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(GROUPS, st.integers(0, 400))
def test_thinned_plans_hold_the_budget_and_beat_a_smaller_one(groups, budget):
    most, knapsack.MOST_KEPT = knapsack.MOST_KEPT, 40
    try:
        plan = fastest_plan(groups, budget)
    finally:
        knapsack.MOST_KEPT = most
    assert plan.nbytes <= budget
    width = max(1, -(-budget // 40))
    smaller = budget - width * sum(group.layers for group in groups)
    if smaller >= 0:
        assert plan.seconds <= exhaustive(groups, smaller) + 1e-9


def test_nothing_fits_where_the_least_does_not():
    assert fastest_plan([Group(2, (Form("a", 3, 1.0),))], 5) is None
    assert fastest_plan([Group(2, (Form("a", 3, 1.0),))], 6).nbytes == 6


def test_a_model_of_many_layers_is_planned_quickly():
    forms = tuple(Form(str(n), n * n * 1237 + n, 1 / (n + 1)) for n in range(6))
    plan = fastest_plan([Group(60, forms), Group(20, forms)], 1_000_000)
    assert 0.98 * 1_000_000 < plan.nbytes <= 1_000_000


def measured(stage=0, *, kept=100, seconds=2.0, resident=1000, peak=500, head=50, under_way=1, layers=4):
    costs = Costs(
        layers,
        {WHOLE: 10, NOTHING: kept, ATTENTION: 60},
        {WHOLE: seconds, NOTHING: 0.0, ATTENTION: seconds / 2},
    )
    return Measured(stage, resident, peak, head, "layer", {0: under_way}, {(0, "layer"): costs})


def test_ranks_of_a_stage_plan_the_same_from_their_largest_values():
    ranks = [measured(kept=100), measured(kept=130), measured(stage=1, kept=900)]
    plans = [plan_of_stage(of_stage(ranks, 0), 1700) for _ in range(2)]
    assert plans[0] == plans[1] == plan_of_stage(measured(kept=130), 1700)


def test_full_recomputation_is_all_that_its_own_need_leaves_but_for_the_last_layer():
    plan = plan_of_stage(measured(), 1500)
    # The last layer has at the peak what it keeps; nothing else may keep more.
    assert plan.forms[0, "layer"] == (WHOLE, WHOLE, WHOLE, NOTHING)
    assert plan_of_stage(measured(), 1499) is None


def test_bytes_count_for_every_micro_batch_under_way():
    once, thrice = (plan_of_stage(measured(under_way=n), 1770) for n in (1, 3))
    assert once.forms[0, "layer"] == (NOTHING,) * 4
    assert once.nbytes == 3 * 90
    assert thrice.nbytes <= 270
    assert thrice.forms[0, "layer"].count(NOTHING) < 4


def test_the_loss_counts_where_it_needs_more_than_backward():
    assert plan_of_stage(measured(head=500), 1500).forms[0, "layer"] == (WHOLE,) * 4


def test_swapping_pays_for_what_is_on_its_way():
    costs = measured()
    layer = costs.costs[0, "layer"]
    layer.nbytes[SWAP], layer.seconds[SWAP], layer.moving = 20, 0.1, 80
    without = plan_of_stage(costs, 1500 + 79, depth=0)
    assert SWAP not in without.forms[0, "layer"]
    # One layer on its way, and ten bytes of each of the others.
    enough = plan_of_stage(costs, 1500 + 80 + 30, depth=0)
    assert enough.forms[0, "layer"].count(SWAP) == 3
    assert SWAP not in plan_of_stage(costs, 1500 + 80 + 30, depth=1).forms[0, "layer"]


def test_a_stage_without_layers_has_an_empty_plan():
    plan = plan_of_stage(Measured(resident=10, peak=5), 20)
    assert (plan.forms, plan.nbytes, plan.seconds) == ({}, 0, 0.0)

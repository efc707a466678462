"""Schedules: their closed forms, another implementation's lists, what is refused, their text."""

import itertools
from types import SimpleNamespace

import pytest

from mindspeed_core.errors import UserError
from mindspeed_pp.actions import A, B, F, O, W, parse_action
from mindspeed_pp.channels import goes_up, look_ahead, stuck
from mindspeed_pp.choice import shortest
from mindspeed_pp.lint import lint
from mindspeed_pp.placement import Placement, loop, vee
from mindspeed_pp.registry import rule_named
from mindspeed_pp.rule import Context
from mindspeed_pp.schedule import made, parse_schedule
from mindspeed_pp.schedules import BUILT_IN
from mindspeed_pp.simulator import Costs, simulate
from mindspeed_pp.transforms import greedy_weights, recomputed, waves

NAMES = [rule.name for rule in BUILT_IN]
TIMES = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.5, 0.5))
SIZES = list(itertools.product((2, 4, 8), (1, 2, 4)))


def built(name, p, m, v=2, times=TIMES[0], **options):
    rule = rule_named(name)
    return rule.schedule(Context(p, rule.chunks or v, m, times, options))


def course(name, p, m, v=2, times=TIMES[0], **costs):
    return simulate(built(name, p, m, v, times), Costs(*times, **costs))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "rounds"), SIZES)
def test_bubbles_are_those_of_the_closed_forms(p, rounds, times):
    f, b, w = times
    m = rounds * p
    assert course("1f1b", p, m, times=times).bubble == pytest.approx((p - 1) * (f + b + w))
    for v in (2, 4):
        assert course("interleaved", p, m, v, times).bubble == pytest.approx((p - 1) * (f + b + w) / v)
        assert course("fold-aiao", p, m, v, times).bubble == pytest.approx((p - 1) * (f + b + w) / v)
    if rounds > 1:
        assert course("zb-h1", p, m, times=times).bubble == pytest.approx((p - 1) * (f + b - w))
        assert course("zbi", p, m, times=times).bubble == pytest.approx((p - 1) * (f + b - w) / 2)
        assert course("zb-h2", p, m, times=times).span_bubble == pytest.approx((p - 1) * (f + b - 2 * w))
        if times == TIMES[0]:
            assert course("zbv", p, m).bubble == pytest.approx((p - 1) / 2)
            assert course("zbv", p, m).span_bubble == pytest.approx(0)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_peaks_are_those_of_the_closed_forms(p):
    m = 4 * p
    assert course("1f1b", p, m).peaks == tuple(p - r for r in range(p))
    assert course("interleaved", p, m).peaks == tuple((2 * (p - r - 1) + p + 1) / 2 for r in range(p))
    for name in ("zb-h1", "zbi", "zbv", "list"):
        assert max(course(name, p, m).peaks) == p
    assert max(course("zb-h2", p, m).peaks) == 2 * p - 1
    assert max(course("fold-aiao", p, m).peaks) == m
    assert max(course("dualpipev", p, m).peaks) == p + 0.5


@pytest.mark.parametrize(
    ("name", "plain", "skewed", "with_messages"),
    [
        ("1f1b", 117.0, 117.0, 123.8),
        ("interleaved", 106.5, 106.5, 109.5),
        ("nanopipe", 101.0, 101.8, None),
        ("zb-h1", 103.0, 105.8, 105.8),
        ("zb-h2", 103.0, 103.0, None),
        ("zbi", 99.5, 100.9, 103.1),
        ("zbv", 99.5, 100.2, 102.8),
    ],
)
def test_steps_of_eight_ranks_and_32_micro_batches(name, plain, skewed, with_messages):
    assert course(name, 8, 32).makespan == pytest.approx(plain)
    assert course(name, 8, 32, times=TIMES[1]).makespan == pytest.approx(skewed)
    if with_messages is not None:
        found = course(name, 8, 32, message=0.1)
        assert found.makespan == pytest.approx(with_messages)
        assert found.exposed_communication == pytest.approx(with_messages - plain)


def test_pairs_pay_where_they_cost_less_than_their_passes():
    detached = built("dualpipev", 4, 16, dw_detach=True)
    assert simulate(detached).makespan == pytest.approx(49.5)
    assert simulate(detached, Costs(paired=0.8)).makespan == pytest.approx(43.2)
    assert simulate(built("dualpipev", 4, 16)).makespan > simulate(detached).makespan


def test_pairs_wait_for_all_they_need_only_side_by_side():
    detached = built("dualpipev", 4, 16, dw_detach=True)
    assert simulate(detached).bubble == course("zbv", 4, 16).bubble
    side_by_side = simulate(detached, Costs(paired=1 - 1e-9))
    assert side_by_side.bubble == pytest.approx(course("zb-h1", 4, 16).bubble)


@pytest.mark.parametrize("name", NAMES)
def test_every_size_that_is_not_refused_can_run_and_never_blocks(name):
    rule = rule_named(name)
    for p, v, m in itertools.product((1, 2, 3, 4), (1, 2, 3), range(1, 10)):
        if rule.refusal(p, v, m):
            continue
        schedule = rule.schedule(Context(p, v, m))
        lint(schedule)
        assert not stuck(schedule)
        assert not stuck(schedule, ahead=2)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"fold-aiao"}))
def test_one_communicator_for_both_directions_would_block(name):
    assert stuck(built(name, 4, 16), directed=False)


def test_opposite_channels_never_share_a_communicator():
    for ranks in range(2, 9):
        for one, other in itertools.permutations(range(ranks), 2):
            assert goes_up(one, other, ranks) != goes_up(other, one, ranks)


def test_the_last_dual_pipe_v_is_that_of_torch():
    from torch.distributed.pipelining import schedules

    names = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "A"}
    for p, m in ((2, 4), (4, 16), (3, 9)):
        ours = built("dualpipev", p, m, dw_detach=True)
        for rank in range(p):
            theirs = schedules.ScheduleDualPipeV._calculate_single_rank_operations(
                SimpleNamespace(pp_group_size=p, _n_microbatches=m), rank
            )
            assert [
                tuple((names[a.computation_type.name], a.stage_index, a.microbatch_index) for a in each)
                for each in (action.sub_actions or (action,) for action in theirs)
            ] == [tuple(part[:3] for part in action.flat()) for action in ours.orders[rank]]


def test_interleaved_is_megatron_cores_order():
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    table = get_schedule_table(8, 3, 4)
    order = built("interleaved", 4, 8, 3).orders[1]
    assert [(a.microbatch, a.stage // 4) for a in order if a.op == "F"] == list(table)
    assert [(a.microbatch, 2 - a.stage // 4) for a in order if a.op == "A"] == list(table)


GOOD = made("good", loop(2), 2, built("1f1b", 2, 2).orders)


def changed(rank, *order):
    orders = list(GOOD.orders)
    orders[rank] = tuple(parse_action(text) for text in order)
    return made("bad", GOOD.placement, 2, orders)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (changed(0, "F0.0", "A0.0", "A0.1"), "F of stage 0 and micro-batch 1 comes 0 times instead of once"),
        (changed(0, "F0.0", "F0.1", "F0.1", "A0.0", "A0.1"), "micro-batch 1 comes 2 times"),
        (changed(0, "F0.0", "F0.1", "A0.0", "A0.1", "W0.1"), "W (or A) of stage 0 and micro-batch 1 comes 2"),
        (changed(0, "F1.0", "F0.1", "A0.0", "A0.1"), "rank 0, item 0: F1.0 belongs to rank 1, which holds"),
        (changed(0, "F0.0", "F0.5", "A0.0", "A0.1"), "F0.5 is beyond stage 1 or micro-batch 1"),
        (changed(0, "F0.0", "F0.1", "A0.0", "D0", "A0.1"), "item 3: D0 comes before the last gradient"),
        (changed(0, "F0.0", "G0", "F0.1", "A0.0", "A0.1"), "item 1: G0 comes after a forward pass"),
        (
            changed(0, "F0.0", "A0.1", "F0.1", "A0.0"),
            "rank 0 waits at item 1 (A0.1) for F0.1, item 2 of rank 0 behind A0.1",
        ),
        (
            changed(1, "F1.1", "A1.1", "F1.0", "A1.0"),
            None,
        ),
        (
            made(
                "short", Placement((0, 0, 1)), 1, [[F(0, 0), F(1, 0), A(1, 0), A(0, 0)], [F(2, 0), A(2, 0)]]
            ),
            "ranks have different numbers of stages",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_action_or_the_circle(schedule, message):
    if message is None:
        lint(schedule)
        return
    with pytest.raises(UserError) as error:
        lint(schedule)
    assert message in str(error.value)


def test_ranks_that_wait_for_each_other_are_named_with_their_positions():
    orders = [[F(0, 0), A(0, 0), F(0, 1), A(0, 1)], [F(1, 1), F(1, 0), A(1, 0), A(1, 1)]]
    with pytest.raises(UserError) as error:
        lint(made("circle", loop(2), 2, orders))
    assert "rank 0 waits at item 1 (A0.0) for A1.0, item 2 of rank 1 behind F1.1" in str(error.value)
    assert "rank 1 waits at item 0 (F1.1) for F0.1, item 2 of rank 0 behind A0.0" in str(error.value)


def test_a_limit_of_memory_is_kept():
    lint(built("1f1b", 4, 8), 4)
    with pytest.raises(UserError, match="rank 0 keeps 4 micro-batches alive, and the limit is 3"):
        lint(built("1f1b", 4, 8), 3)


def test_two_messages_in_the_other_order_need_two_receives():
    orders = [[F(0, 0), F(0, 1), A(0, 0), A(0, 1)], [F(1, 1), F(1, 0), A(1, 0), A(1, 1)]]
    schedule = made("swapped", loop(2), 2, orders)
    assert look_ahead(schedule)[0, 1] == 2
    assert not stuck(schedule)


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_schedule_is_the_schedule(name):
    schedule = built(name, 4, 8)
    again = parse_schedule(schedule.text())
    assert again == schedule
    assert again.digest == schedule.digest
    assert len(schedule.csv().splitlines()) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ranks 0 1\nmicrobatches 1\n0: F0.0 A0.0\n", "one list for each rank from 0 on"),
        ("ranks 0\nmicrobatches 1\n0: F0.0 X0.0\n", "line 3: 'X0.0': an action is a letter"),
        ("ranks 0\nmicrobatches 1\n0: F0.0 (A0.0|F0.1)\n", "two at once are a forward and a backward pass"),
        ("ranks 0\nmicrobatches one\n0: F0.0\n", "line 2"),
        ("order 0\n", "line 1"),
    ],
)
def test_a_file_that_cannot_be_read_names_its_line(text, message):
    with pytest.raises(UserError) as error:
        parse_schedule(text, "some.txt")
    assert message in str(error.value)
    assert str(error.value).startswith("some.txt")


def test_pairs_have_a_text():
    assert str(O(F(0, 4), A(3, 1))) == "(F0.4|A3.1)"
    assert parse_action("(F0.4|A3.1)") == O(F(0, 4), A(3, 1))


def test_weight_gradients_go_where_ranks_wait_and_never_lengthen_the_step():
    for name, times in itertools.product(("zb-h1", "zbv", "zbi"), TIMES):
        schedule, costs = built(name, 4, 16, times=times), Costs(*times)
        moved = greedy_weights(schedule, costs)
        lint(moved)
        assert simulate(moved, costs).makespan <= simulate(schedule, costs).makespan
        assert max(simulate(moved, costs).peaks) <= max(simulate(schedule, costs).peaks)
    late = [[F(0, 0), F(0, 1), B(0, 0), B(0, 1), W(0, 0), W(0, 1)], [F(1, 0), A(1, 0), F(1, 1), A(1, 1)]]
    schedule = made("late", loop(2), 2, late)
    assert simulate(greedy_weights(schedule, Costs())).makespan < simulate(schedule).makespan


def test_recomputed_passes_leave_the_critical_path_to_gradients():
    schedule = built("interleaved", 4, 8)
    again = recomputed(schedule)
    lint(again)
    assert simulate(again).makespan == pytest.approx(35.0)
    assert max(simulate(again).peaks) <= 1


@pytest.mark.parametrize("placement", [loop(3), loop(2, 3), vee(4), Placement((1, 0, 2, 1, 0, 2))])
def test_waves_go_with_any_placement(placement):
    for microbatches in (1, 2, 5):
        lint(waves("waves", placement, microbatches))
        lint(waves("waves", placement, microbatches))


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((4, None, 16, None, TIMES[0], True), "zbv"),
        ((4, None, 12, None, TIMES[0], True), "zb-h1"),
        ((4, 3, 12, None, TIMES[0], True), "zbi"),
        ((4, 2, 16, None, TIMES[0], False), "interleaved"),
        ((4, None, 16, None, TIMES[0], False), "1f1b"),
    ],
)
def test_the_shortest_schedule_is_chosen(sizes, name):
    assert shortest(*sizes) == name

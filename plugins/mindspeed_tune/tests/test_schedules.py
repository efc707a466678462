import pytest
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from synthetic_ranks import stages

from mindspeed_tune.layout import Layout
from mindspeed_tune.schedules import BACKWARD, FORWARD, fewest, in_flight, numbers, order, warmup
from mindspeed_tune.timeline import Blocked, simulate


@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches"), [(1, 1, 3), (4, 1, 2), (4, 1, 9), (2, 2, 4), (4, 3, 8)]
)
def test_every_stage_runs_every_pass_once_and_keeps_what_it_says(pp, vpp, microbatches):
    layout = Layout(pp, pp=pp, vpp=vpp)
    for stage in range(pp):
        steps = order(layout, stage, microbatches)
        assert len(set(steps)) == len(steps) == 2 * vpp * microbatches
        alive = most = 0
        for direction, _, _ in steps:
            alive += 1 if direction == FORWARD else -1
            most = max(most, alive)
        assert most == in_flight(layout, stage, microbatches)


def test_interleaved_forward_passes_follow_megatron_cores_table():
    layout = Layout(4, pp=4, vpp=2)
    forwards = [(number, chunk) for kind, chunk, number in order(layout, 1, 8) if kind == FORWARD]
    assert forwards == get_schedule_table(8, 2, 4)
    assert warmup(layout, 0, 8) == 3 * 2 + 4
    assert fewest(layout) == (8, 4)


@pytest.mark.parametrize(
    ("layout", "microbatches", "wanted"),
    [
        (Layout(1), 5, [2, 1]),
        (Layout(4, pp=4), 2, [2]),
        (Layout(4, pp=4), 9, [2, 1]),
        # Both stages of two are of a kind of their own, the middle ones of four are alike.
        (Layout(2, pp=2, vpp=2), 2, [2]),
        (Layout(2, pp=2, vpp=2), 4, [4, 2]),
        (Layout(4, pp=4, vpp=2), 16, [8, 4]),
    ],
)
def test_as_few_micro_batches_are_run_as_tell_every_number(layout, microbatches, wanted):
    for stage in range(layout.pp):
        assert numbers(layout, stages(layout), stage, microbatches) == wanted


def test_a_step_of_one_group_of_micro_batches_is_run_itself_and_a_longer_one_where_stages_are_alike():
    layout = Layout(4, pp=4, vpp=2)
    found = [numbers(layout, stages(layout), stage, 4) for stage in range(4)]
    assert found == [[4], [4, 8], [4, 8], [4]]


def test_where_all_layers_run_anyway_a_stage_of_its_own_runs_the_whole_step_alone():
    layout = Layout(4, pp=4, vpp=2)
    found = [numbers(layout, stages(layout), stage, 8, all_layers=True) for stage in range(4)]
    assert found == [[8], [8, 4], [8, 4], [8]]


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (8, 8)])
def test_equal_stages_have_the_textbooks_bubble(pp, microbatches):
    layout = Layout(pp, pp=pp)
    durations = [{(FORWARD, 0): 1.0, (BACKWARD, 0): 2.0}] * pp
    line = simulate([order(layout, stage, microbatches) for stage in range(pp)], durations)
    assert line.seconds == 3 * (microbatches + pp - 1)
    assert line.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1))


def test_interleaving_divides_the_bubble_by_the_chunks():
    layout = Layout(4, pp=4, vpp=2)
    durations = [{(kind, chunk): t for kind, t in ((FORWARD, 0.5), (BACKWARD, 1.0)) for chunk in (0, 1)}] * 4
    line = simulate([order(layout, stage, 8) for stage in range(4)], durations)
    assert line.seconds == pytest.approx(3 * 8 + 3 / 2 * 3)


def test_a_slow_stage_sets_the_pace():
    layout = Layout(2, pp=2)
    durations = [{(FORWARD, 0): 1.0, (BACKWARD, 0): 1.0}, {(FORWARD, 0): 3.0, (BACKWARD, 0): 3.0}]
    line = simulate([order(layout, stage, 10) for stage in range(2)], durations)
    assert line.seconds == pytest.approx(1 + 10 * 6 + 1)


def test_transfers_lengthen_the_way_through_the_stages():
    layout = Layout(3, pp=3)
    durations = [{(FORWARD, 0): 1.0, (BACKWARD, 0): 1.0}] * 3
    orders = [order(layout, stage, 1) for stage in range(3)]
    assert simulate(orders, durations, 0.5).seconds == simulate(orders, durations).seconds + 4 * 0.5


def test_orders_that_wait_for_each_other_are_named():
    wrong = [[(BACKWARD, 0, 0), (FORWARD, 0, 0)], [(FORWARD, 0, 0), (BACKWARD, 0, 0)]]
    with pytest.raises(Blocked, match="stage 0 waits for ever for the backward pass of micro-batch 0"):
        simulate(wrong, [{(FORWARD, 0): 1.0, (BACKWARD, 0): 1.0}] * 2)

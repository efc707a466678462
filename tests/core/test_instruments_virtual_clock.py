"""A clock that moves with a rank's work: what it waits for, call by call."""

import pytest

from mindspeed_megatron.instruments.communication import Call, Progress
from mindspeed_megatron.instruments.virtual_clock import on_a_clock


def call(launched, waited, group="g", size=1):
    """A call between two points of a program, which are seconds and operations at once."""
    points = [None if at is None else Progress(float(at), 0, at) for at in (launched, waited)]
    return Call("all_to_all_single", group, (0, 1), size, 0, True, points[0], waited=points[1])


def waits(calls, **lengths):
    return [one.waited for one in on_a_clock(calls, lambda one: lengths.get(one.group))]


@pytest.mark.parametrize(("length", "waited"), [(3, 0), (5, 0), (8, 3)])
def test_a_call_is_hidden_by_what_is_computed_meanwhile(length, waited):
    assert waits([call(2, 7)], g=length) == [waited]


def test_calls_of_a_group_run_one_after_the_other():
    assert waits([call(0, 4), call(0, 5)], g=4) == [0, 3]


def test_calls_of_different_groups_run_at_the_same_time():
    assert waits([call(0, 4, "a"), call(0, 5, "b")], a=4, b=4) == [0, 0]


def test_a_wait_delays_what_comes_after_it():
    # The first call ends at 10 instead of 2; the second, launched 1 operation later, at 11 + 4.
    assert waits([call(0, 2, "a"), call(3, 6, "b")], a=10, b=4) == [8, 1]


def test_calls_without_a_length_or_a_wait_are_left_out():
    assert waits([call(0, 2, "other"), call(0, None), call(1, 2)], g=1) == [0]
    (found,) = on_a_clock([call(1, 4)], lambda _: 2.0)
    assert (found.duration, found.meanwhile) == (2.0, 3)

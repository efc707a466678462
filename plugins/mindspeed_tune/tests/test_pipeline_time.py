"""The seconds of a step without its timeline are those of the timeline."""

import random

import pytest

from mindspeed_tune.layout import Layout
from mindspeed_tune.pipeline_time import pipeline_seconds
from mindspeed_tune.schedules import BACKWARD, FORWARD, order
from mindspeed_tune.timeline import simulate


@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches"), [(2, 1, 3), (4, 1, 8), (3, 2, 6), (4, 4, 8), (1, 1, 5)]
)
def test_seconds_and_bubble_are_those_of_the_timeline(pp, vpp, microbatches):
    chosen = random.Random(pp * 100 + vpp)
    durations = [
        {
            (direction, chunk): chosen.uniform(1.0, 2.0)
            for direction in (FORWARD, BACKWARD)
            for chunk in range(vpp)
        }
        for _ in range(pp)
    ]
    layout = Layout(pp, pp=pp, vpp=vpp)
    expected = simulate([order(layout, stage, microbatches) for stage in range(pp)], durations, 0.3)
    bubble, seconds = pipeline_seconds(pp, vpp, microbatches, durations, 0.3)
    assert seconds == pytest.approx(expected.seconds)
    assert bubble == pytest.approx(expected.bubble)


def test_further_micro_batches_take_as_long_as_the_slowest_stage():
    durations = [{(FORWARD, 0): 1.0, (BACKWARD, 0): 2.0}, {(FORWARD, 0): 1.5, (BACKWARD, 0): 2.5}]
    _, few = pipeline_seconds(2, 1, 40, durations, 0.0)
    _, more = pipeline_seconds(2, 1, 42, durations, 0.0)
    assert more - few == pytest.approx(2 * 4.0)
    layout = Layout(2, pp=2)
    whole = simulate([order(layout, stage, 42) for stage in range(2)], durations)
    assert more == pytest.approx(whole.seconds)

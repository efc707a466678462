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
    seconds = pipeline_seconds(pp, vpp, microbatches, durations, 0.3)
    assert seconds == pytest.approx(expected.seconds)


@pytest.mark.parametrize("transfer", [0.0, 0.2, 3.0])
@pytest.mark.parametrize(("pp", "vpp", "microbatches"), [(2, 1, 41), (4, 1, 42), (4, 2, 40), (8, 1, 70)])
def test_further_micro_batches_take_what_a_round_of_the_pipeline_takes(pp, vpp, microbatches, transfer):
    durations = [
        {
            (d, chunk): (1.0 + 0.1 * stage) * (1 + (d == BACKWARD))
            for d in (FORWARD, BACKWARD)
            for chunk in range(vpp)
        }
        for stage in range(pp)
    ]
    layout = Layout(pp, pp=pp, vpp=vpp)
    whole = simulate([order(layout, stage, microbatches) for stage in range(pp)], durations, transfer)
    found = pipeline_seconds(pp, vpp, microbatches, durations, transfer)
    assert found == pytest.approx(whole.seconds, rel=0.005)

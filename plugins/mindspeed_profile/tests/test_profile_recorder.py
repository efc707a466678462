"""The profiler sees the chosen steps, and is stopped exactly once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_profile.options import ProfileOptions
from mindspeed_profile.recorder import StepRecorder


class RecordingProfiler:
    def __init__(self, warmup, first, end):
        self.asked = (warmup, first, end)
        self.events = []

    def start(self):
        self.events.append("start")

    def step(self):
        self.events.append("step")

    def stop(self):
        self.events.append("stop")


def options(start, end):
    return ProfileOptions(start, end, 0, False, False, False, False, Path("traces"), (0,))


def run(start, end, first, last):
    """Run the steps ``[first, last)``; the profilers made, and the steps that were being recorded."""
    made, recorded = [], []

    def make(*asked):
        made.append(RecordingProfiler(*asked))
        return made[-1]

    recorder = StepRecorder(options(start, end), make)
    for iteration in range(first, last):
        recorder.before_step(iteration)
        if recorder.recording(iteration):
            recorded.append(iteration)
        recorder.after_step(iteration)
    recorder.close()
    return made, recorded


@given(start=st.integers(0, 8), length=st.integers(1, 4), first=st.integers(0, 12), count=st.integers(0, 12))
def test_exactly_the_chosen_steps_of_the_run_are_recorded(start, length, first, count):
    made, recorded = run(start, start + length, first, first + count)
    assert recorded == [step for step in range(first, first + count) if start <= step < start + length]
    assert len(made) <= 1
    for profiler in made:
        assert profiler.events[0] == "start"
        assert profiler.events.count("stop") == 1
        assert profiler.events[-1] == "stop"


def test_the_step_before_warms_the_profiler_up():
    made, _ = run(10, 12, 0, 20)
    assert made[0].asked == (1, 10, 12)
    assert made[0].events == ["start", "step", "step", "step", "stop"]


def test_a_run_that_begins_with_the_first_step_has_no_warm_up():
    made, _ = run(0, 2, 0, 5)
    assert made[0].asked == (0, 0, 2)


def test_a_run_resumed_within_the_steps_records_the_rest():
    made, recorded = run(10, 14, 12, 20)
    assert made[0].asked == (0, 12, 14)
    assert recorded == [12, 13]


@pytest.mark.parametrize("ranks", [(1,), (0, 3), (-1,)])
def test_ranks_are_recorded_as_chosen(ranks):
    chosen = ProfileOptions(0, 1, 0, False, False, False, False, Path("traces"), ranks)
    assert [rank for rank in range(4) if chosen.records(rank)] == (
        list(range(4)) if ranks == (-1,) else list(ranks)
    )

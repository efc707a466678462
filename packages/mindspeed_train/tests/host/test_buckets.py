"""The number of gradient buckets is what was asked for."""

import pytest
from test_checkpoint_resume import close_run, open_run

from mindspeed_testing.worlds import run_world


def buckets(cases):
    found = []
    for flags in cases:
        run = open_run(flags)
        found.append(sum(len(buffer.buckets) for buffer in run.model[0].buffers))
        close_run(run)
    return found


CASES = {
    2: ["--overlap-grad-reduce", "--ddp-num-buckets", "2"],
    4: ["--overlap-grad-reduce", "--ddp-num-buckets", "4", "--use-distributed-optimizer"],
    1: ["--ddp-num-buckets", "4"],
}


@pytest.fixture(scope="module")
def found():
    return dict(zip(CASES, run_world(buckets, 1, list(CASES.values()))[0]))


@pytest.mark.parametrize("expected", CASES)
def test_gradients_are_in_as_many_buckets_as_asked_for_and_in_one_without_overlap(found, expected):
    assert found[expected] == expected

"""What a run leaves in its process, for the runs that follow in it."""

import gc
import os

from mindspeed_core.activation import activate
from mindspeed_core.hosts.standalone import loop
from mindspeed_core.testing import run_world
from mindspeed_core.testing.model_flags import training_flags


def build_and_end():
    with activate(training_flags((), 1), platform="cpu", host="standalone") as session:
        session.call("train_step", run=loop.setup(session))
        loop.teardown(session)


def threads_after_each_run():
    # Whether a collection happens to come in between is chance.
    gc.disable()
    found = []
    for _ in range(4):
        build_and_end()
        found.append(len(os.listdir("/proc/self/task")))
    return found


def test_threads_of_the_groups_of_earlier_runs_end():
    for first, second, *later in run_world(threads_after_each_run, 2):
        # The modules of the last run may live until the next one ends.
        assert max(later) <= max(first, second) + 2

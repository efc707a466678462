"""Traces of a run in its process, for the runs that follow in it."""

import gc
import multiprocessing
import os

import torch
import torch.distributed as dist

from mindspeed_core.activation import activate
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop


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


def loading_processes(torn_down):
    """Their number in a run, and when the run has ended while its iterators are still held."""
    with activate(training_flags(("--num-workers", "1"), 1), platform="cpu", host="standalone") as session:
        run = loop.setup(session)
        session.call("train_step", run=run)
        before = len(multiprocessing.active_children())
        if torn_down:
            loop.teardown(session)
            return before, len(multiprocessing.active_children()), run.data is None
    return before, len(multiprocessing.active_children()), run.data is None


def of_both_ends():
    return [loading_processes(torn_down) for torn_down in (False, True)]


def test_loading_processes_end_with_the_session_and_when_a_run_is_torn_down():
    assert run_world(of_both_ends, 1) == [[(1, 0, False)] * 2]


def summed_in_turns(ranks):
    """Sessions one after another in a world that is somebody else's."""
    dist.init_process_group("gloo", init_method="env://")
    found = []
    for _ in range(3):
        with activate(training_flags((), 1), platform="cpu", host="standalone") as session:
            group = session.groups.create("all", [list(range(ranks))], members_only=True)
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            found.append(int(total))
    return found


def test_a_later_session_of_a_world_has_working_groups():
    assert run_world(summed_in_turns, 2, 2) == [[2, 2, 2]] * 2

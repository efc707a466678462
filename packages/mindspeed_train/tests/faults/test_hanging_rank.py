"""A rank that stands still is found by a timeout and named, wherever it stands."""

import os
import shlex
import signal
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mindspeed_core.feature import Feature, hookimpl
from mindspeed_testing.faults import start_job
from mindspeed_testing.worlds import WorldError, run_world
from mindspeed_train.fault_tolerance.hang_watch import Pulse, find_culprit, shared_name

FLAGS = shlex.split(
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --lr 1e-3 --eval-iters 0 "
    "--no-progress"
)


class Stuck(Feature):
    name = "stuck"
    summary = "never returns from the data of the third step on one rank"

    @hookimpl(wrapper=True)
    def get_batch(self, run):
        if run.dist.rank == 1 and run.iteration == 2:
            threading.Event().wait()
        return (yield)


def stuck_world(folder):
    from mindspeed_core.activation import activate
    from mindspeed_train.loop import train

    flags = [*FLAGS, "--train-iters", "5", "--run-dir", folder, "--hang-timeout-minutes", "0.05"]
    with activate(flags, extra_plugins=[Stuck()], host="standalone") as session:
        train(session)


def test_a_rank_that_never_leaves_its_data_is_named_with_its_place(tmp_path):
    with pytest.raises(WorldError) as caught:
        run_world(stuck_world, 2, str(tmp_path), timeout=60)
    text = str(caught.value) + "".join(failure.details for failure in caught.value.failures)
    assert "no progress for 3 s (--hang-timeout-minutes) after step 2: rank 1 has been in" in text
    assert "get_batch" in text
    assert text.count("no progress") <= 2


def names_after_a_node_was_replaced():
    """One agent has counted a restart, the one that replaces a lost node has not."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": str(1 - int(os.environ["RANK"]))}
    dist.init_process_group("gloo")
    info = SimpleNamespace(rank=dist.get_rank(), world_size=2)
    names = [shared_name(info), shared_name(info)]
    dist.barrier()
    dist.destroy_process_group()
    return names


def test_ranks_that_count_restarts_differently_watch_each_other():
    first, second = run_world(names_after_a_node_was_replaced, 2)
    assert first == second
    assert len(set(first)) == 2


def test_a_stopped_process_is_named_and_the_job_goes_on_without_it(tmp_path):
    flags = [*FLAGS, "--train-iters", "4000", "--save", str(tmp_path / "save"), "--save-interval", "2"]
    flags += ["--nproc", "2", "--max-restarts", "1", "--hang-timeout-minutes", "0.08"]
    job = start_job(
        [*flags, "--run-dir", str(tmp_path / "run"), "--keep-last-n", "1"], tmp_path / "output.txt"
    )
    try:
        job.wait_for(lambda: job.text().count("saved") > 1)
        job.workers()[1].send_signal(signal.SIGSTOP)
        job.wait_for(lambda: len(job.starts()) == 2)
        before = len(job.text())
        job.wait_for(lambda: job.text().count("saved", before) > 0)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 0
    finally:
        job.close()
    assert "rank 1 of 2 failed: no progress for 5 s" in job.text()
    assert "rank 1 has not answered" in job.text()
    assert job.starts()[1] > 0


@pytest.mark.parametrize(
    ("pulses", "silent", "rank", "words"),
    [
        (
            {0: Pulse(9, 5.0, True, "a"), 1: Pulse(9, 5.0, False, "load (data.py:3)")},
            {},
            1,
            "in load (data.py:3)",
        ),
        ({0: Pulse(9, 5.0, False, "a"), 1: Pulse(4, 1.0, True, "b")}, {1: 6.0}, 1, "not answered for 6 s"),
        ({0: Pulse(9, 5.0, True, "a"), 1: Pulse(9, 5.0, True, "b")}, {}, 0, "every rank waits"),
        ({0: Pulse(9, 5.0, False, "a"), 1: Pulse(9, 7.0, False, "b")}, {}, 1, "in b"),
        ({0: Pulse(9, 5.0, True, "a"), 1: Pulse(9, 0.0, done=True)}, {}, 0, "every rank waits"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_chosen(pulses, silent, rank, words):
    found = find_culprit(pulses, silent)
    assert found.rank == rank
    assert words in found.text

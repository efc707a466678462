"""Each process of a job is stopped once: it is named, and what can go on goes on."""

from __future__ import annotations

import os
import shlex
import signal
from contextlib import suppress

import psutil
import pytest

from mindspeed_testing.faults import start_job

FLAGS = shlex.split(
    "--platform cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 4 --mock-data --lr 1e-3 --eval-iters 0 --no-progress "
    "--train-iters 1000000 --hang-timeout-minutes 0.05 --save-interval 3 --keep-last-n 1"
)
WRITER = "background_main"


def processes_of(worker, role):
    """Return the data workers or the writer of a rank that live now."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(worker.pid).children():
            line = " ".join(child.cmdline())
            if "resource_tracker" not in line and (WRITER in line) == (role == "writer"):
                found.append(child)
    return found


def victim(job, role):
    """Wait for the process that has a role in a training job; return it."""
    if role == "supervisor":
        return psutil.Process(job.process.pid)
    workers = job.workers()
    if role in ("rank 0", "last rank"):
        return workers[0 if role == "rank 0" else -1]
    found = []
    job.wait_for(lambda: bool(found.extend(processes_of(workers[-1], role)) or found))
    return found[0]


def named(role, count, pid):
    """Return what has to be said."""
    return {
        "rank 0": "rank 0 has not answered for",
        "last rank": f"rank {count - 1} has not answered for",
        "supervisor": f"the supervisor (process {pid}) is stopped by a signal",
        "data worker": f"its process {pid}, which loads data, is stopped by a signal",
        "writer": f"(process {pid}) made no progress for",
    }[role]


def start(tmp_path, role, *own):
    flags = [*FLAGS, *own, "--save", str(tmp_path / "save"), "--run-dir", str(tmp_path / "run")]
    flags += ["--num-workers", "1" if role == "data worker" else "0"]
    # Its limit is 0.8 of that: on a busy machine the watch must not come first.
    flags += ["--async-save", "--hang-timeout-minutes", "0.2"] if role == "writer" else []
    job = start_job(flags, tmp_path / "output.txt")
    job.wait_for(lambda: job.text().count("saved ") > 1, seconds=120.0)
    return job


ROLES = ("rank 0", "last rank", "supervisor", "data worker", "writer")
SHORT = [("rank 0", 2, 1), ("supervisor", 2, 0), ("writer", 1, 0)]
EVERY = [
    (role, count, restarts)
    for role in ROLES
    for count in (1, 2, 4)
    for restarts in (0, 1)
    if (role, count) != ("rank 0", 1)
]
CASES = [pytest.param(*case, marks=[] if case in SHORT else pytest.mark.thorough) for case in EVERY]


@pytest.mark.parametrize(("role", "count", "restarts"), CASES)
def test_a_stopped_process_is_named(tmp_path, role, count, restarts):
    job = start(tmp_path, role, "--nproc", str(count), "--max-restarts", str(restarts))
    try:
        stopped = victim(job, role)
        stopped.send_signal(signal.SIGSTOP)
        job.wait_for(lambda: named(role, count, stopped.pid) in job.text())
        if role == "supervisor":
            stopped.send_signal(signal.SIGCONT)
        elif not restarts or role == "writer":
            # A save that fails is for the user to put right.
            assert job.end() == 1
            return
        else:
            job.wait_for(lambda: len(job.starts()) == 2)
        before = job.text().count("saved ")
        job.wait_for(lambda: job.text().count("saved ") > before)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 0
    finally:
        job.close()
        for process in {stopped, *job.workers()}:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def test_a_stopped_rank_0_that_serves_the_store_is_named_without_a_supervisor(tmp_path):
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "7",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    own = ["--num-workers", "0", "--save", str(tmp_path / "save"), "--run-dir", str(tmp_path / "run")]
    tasks = [
        start_job(
            [*FLAGS, *own],
            tmp_path / f"output-{rank}.txt",
            environment={**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        tasks[0].wait_for(lambda: "saved " in tasks[0].text(), seconds=120.0)
        tasks[0].process.send_signal(signal.SIGSTOP)
        assert tasks[1].end() == 1
        assert "rank 0, which serves the store, has not answered for" in tasks[1].text()
    finally:
        for task in tasks:
            task.close()


def test_a_stopped_data_worker_of_a_run_without_a_supervisor_is_named(tmp_path):
    job = start(tmp_path, "data worker")
    try:
        (stopped,) = processes_of(job.process, "data worker")
        stopped.send_signal(signal.SIGSTOP)
        assert job.end() == 1
        assert named("data worker", 1, stopped.pid) in job.text()
        assert job.text().splitlines()[-1].startswith("last saved: step ")
        # It is killed with the run: nobody would let it go on.
        stopped.wait(10.0)
    finally:
        job.close()


@pytest.mark.thorough
def test_a_stopped_rank_0_that_serves_the_store_is_named_under_torchrun(tmp_path):
    torchrun = shlex.split("--standalone --nproc-per-node 2 -m mindspeed_core.train")
    own = ["--num-workers", "0", "--save", str(tmp_path / "save"), "--run-dir", str(tmp_path / "run")]
    job = start_job(
        [*torchrun, *FLAGS, *own],
        tmp_path / "output.txt",
        program="torch.distributed.run",
        environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    try:
        job.wait_for(lambda: job.text().count("saved ") > 1, seconds=300.0)
        workers = [one for one in job.workers() if "mindspeed_core.train" in one.cmdline()]
        first = next(one for one in workers if one.environ()["RANK"] == "0")
        first.send_signal(signal.SIGSTOP)
        # torchrun gives rank 0 half a minute to end by itself.
        assert job.end(180.0) == 1
    finally:
        job.close()
    assert "rank 0, which serves the store, has not answered for" in job.text()


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [[], ["--nproc", "2"]], ids=["alone", "supervised"])
def test_a_job_that_is_stopped_as_a_whole_goes_on_where_it_was(tmp_path, processes):
    job = start(tmp_path, "whole", *processes)
    try:
        everything = [psutil.Process(job.process.pid), *(job.workers() if processes else ())]
        for process in everything:
            process.suspend()
        # Longer than --hang-timeout-minutes.
        job.pause(4.0)
        for process in reversed(everything):
            process.resume()
        before = job.text().count("saved ")
        job.wait_for(lambda: job.text().count("saved ") > before + 1)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 0
    finally:
        job.close()
    assert "no progress" not in job.text()

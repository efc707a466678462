"""Under launchers that are not ours a job comes back from its own last checkpoint too."""

import os
import signal

import pytest

from mindspeed_testing.faults import KillReport, read_steps, start_job

FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --lr 1e-3 --train-iters 20000 "
    "--eval-iters 0 --attention-dropout 0.1 --hidden-dropout 0.1 --no-progress --save-interval 20 "
    "--keep-last-n 2"
).split()
TORCHRUN = (
    "--standalone --nproc-per-node 2 --max-restarts 1 --monitor-interval 0.1 -m mindspeed_core.train".split()
)


def trained(job, steps):
    report = KillReport()
    read_steps(job.text(), report)
    return max(report.printed, default=0) >= steps


def workers(job):
    return [child for child in job.workers() if "mindspeed_core.train" in child.cmdline()]


@pytest.mark.thorough
def test_torchrun_starts_killed_workers_again_from_the_last_checkpoint(tmp_path):
    own = ["--save", str(tmp_path / "save"), "--run-dir", str(tmp_path / "run")]
    job = start_job([*TORCHRUN, *FLAGS, *own], tmp_path / "output.txt", program="torch.distributed.run")
    try:
        job.wait_for(lambda: trained(job, 30), seconds=120.0)
        workers(job)[1].kill()
        job.wait_for(lambda: len(job.starts()) == 2, seconds=120.0)
        resumed = job.starts()[1]
        job.wait_for(lambda: trained(job, resumed + 25), seconds=120.0)
        for worker in workers(job):
            worker.send_signal(signal.SIGTERM)
        assert job.end() == 0
    finally:
        job.close()
    report = KillReport()
    read_steps(job.text(), report)
    assert resumed >= 20
    assert resumed % 20 == 0
    # The second attempt repeated the steps since the checkpoint, to the digits that are printed.
    assert report.contradictions == []


def test_a_requeued_slurm_job_goes_on_from_its_own_checkpoint(tmp_path):
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    own = ["--save", str(tmp_path / "save"), "--run-dir", str(tmp_path / "run")]

    def tasks(attempt, **changed):
        return [
            start_job(
                [*FLAGS, *own],
                tmp_path / f"output-{attempt}-{rank}.txt",
                environment={**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **changed},
            )
            for rank in range(2)
        ]

    first = tasks("first")
    try:
        first[0].wait_for(lambda: trained(first[0], 30), seconds=120.0)
    finally:
        for task in first:
            task.close()
    again = tasks("again", SLURM_RESTART_COUNT="1")
    try:
        # A step that is printed was computed by both tasks: the other one handles the signal by now.
        again[0].wait_for(
            lambda: bool(again[0].starts()) and trained(again[0], again[0].starts()[0] + 1), seconds=120.0
        )
        again[1].process.send_signal(signal.SIGTERM)
        assert [task.end() for task in again] == [0, 0]
    finally:
        for task in again:
            task.close()
    assert first[0].starts() == [0]
    assert again[0].starts()[0] >= 20
    assert "received SIGTERM" in again[0].text()

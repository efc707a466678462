"""A training whose ranks do not all come ends within the timeout, with one message on each node."""

import shlex

from mindspeed_testing.faults import start_job
from mindspeed_testing.ports import free_port

FLAGS = shlex.split(
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --mock-data --num-workers 0 --lr 1e-3 --train-iters 4 --eval-iters 0 --no-progress"
)


def task(folder, rank, size, port, *flags):
    """Start a task of a Slurm step as a node of its own would."""
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(port),
    }
    return start_job([*FLAGS, "--run-dir", str(folder), *flags], folder / f"{rank}.txt", environment=step)


def test_both_who_waits_and_who_came_elsewhere_say_so(tmp_path):
    limit = ("--distributed-timeout-minutes", "0.05")
    jobs = [task(tmp_path, rank, 2, free_port(), *limit) for rank in range(2)]
    try:
        assert [job.end() for job in jobs] == [1, 1]
    finally:
        for job in jobs:
            job.close()
    zero, one = (job.text() for job in jobs)
    assert zero.startswith("rank 0 of 2:\nerror: rank 1 of 2 did not come within 3 s")
    assert one.startswith("rank 1 of 2:\nerror: rank 1 of 2 (host ")
    assert "within 3 s (--distributed-timeout-minutes): Connection refused" in one
    assert (zero.count("\n"), one.count("\n")) == (2, 2)


def test_another_world_size_on_one_node_is_said_at_once_on_both(tmp_path):
    port = free_port()
    jobs = [task(tmp_path, rank, size, port) for rank, size in ((0, 2), (1, 3))]
    try:
        # Far less than the ten minutes that ranks wait for each other.
        assert [job.end() for job in jobs] == [1, 1]
    finally:
        for job in jobs:
            job.close()
    for rank, job in enumerate(jobs):
        assert job.text().count("was started for WORLD_SIZE 3") == 1
        assert job.text().startswith(f"rank {rank} of ")
        assert job.text().count("\n") == 2

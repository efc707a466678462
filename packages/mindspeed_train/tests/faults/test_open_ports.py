"""A training on one machine opens no port that other machines reach."""

from contextlib import suppress

import psutil
import pytest

from mindspeed_testing.faults import KillReport, read_steps, start_job

FLAGS = (
    "--platform cpu --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --lr 1e-3 --train-iters 100000 "
    "--eval-iters 0 --no-progress"
).split()


def has_trained(job):
    report = KillReport()
    read_steps(job.text(), report)
    return bool(report.printed)


def sockets(job):
    main = psutil.Process(job.process.pid)
    found = []
    for process in (main, *main.children(recursive=True)):
        # A child may end between the list and the look at it.
        with suppress(psutil.NoSuchProcess):
            found += process.net_connections(kind="inet")
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_every_port_of_one_machine_is_on_its_loopback(processes, tmp_path):
    several = ["--nproc", str(processes)] if processes > 1 else []
    job = start_job([*several, *FLAGS, "--run-dir", str(tmp_path / "run")], tmp_path / "output.txt")
    try:
        job.wait_for(lambda: has_trained(job), seconds=120.0)
        found = sockets(job)
    finally:
        job.close()
    listening = [connection for connection in found if connection.status == psutil.CONN_LISTEN]
    assert listening
    assert {connection.laddr.ip for connection in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

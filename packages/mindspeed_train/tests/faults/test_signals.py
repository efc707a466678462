"""A signal ends a run in order, whatever rank gets it and whatever the run is doing: with a checkpoint."""

import os
import signal

import psutil
import pytest

from mindspeed_testing.faults import start_job
from mindspeed_train.checkpoint.inspection import inspect

FLAGS = (
    "--platform cpu --num-layers 4 --hidden-size 128 --num-attention-heads 2 --seq-length 16 "
    "--vocab-size 2048 --micro-batch-size 1 --global-batch-size 2 "
    "--mock-data --num-workers 0 --lr 1e-3 --train-iters 5000 "
    "--eval-iters 0 --no-progress --nproc 2 --keep-last-n 2"
).split()


def saving(save):
    return any(path.name.startswith(".tmp-") for path in save.iterdir()) if save.is_dir() else False


@pytest.mark.parametrize(
    ("flags", "number", "whom"),
    [
        (["--save-interval", "1"], signal.SIGTERM, "all"),
        (["--save-interval", "2", "--async-save"], signal.SIGTERM, "all"),
        (["--save-interval", "1"], signal.SIGUSR1, "rank 1"),
    ],
    ids=["while saving", "while saving in the background", "to one rank"],
)
def test_a_signal_saves_and_ends_the_run(tmp_path, flags, number, whom):
    save = tmp_path / "save"
    flags = [*FLAGS, *flags, "--save", str(save), "--run-dir", str(tmp_path / "run")]
    job = start_job(flags, tmp_path / "output.txt")
    try:
        job.wait_for(lambda: "saved" in job.text() and saving(save))
        (job.process if whom == "all" else job.workers()[1]).send_signal(number)
        assert job.end() == 0
    finally:
        job.close()
    text = job.text()
    assert f"received {number.name}" in text
    stopped = int(text.rpartition("stopping after step ")[2].split(":")[0])
    assert f"step {stopped + 1}/" not in text.replace("   ", " ").replace("  ", " ")
    found = inspect(save)
    assert found["iteration"] == stopped
    assert found["problems"] == []
    assert not saving(save)


def test_a_signal_to_the_loading_processes_too_saves_and_ends_the_run(tmp_path):
    save = tmp_path / "save"
    flags = [*FLAGS, "--num-workers", "1", "--save", str(save), "--run-dir", str(tmp_path / "run")]
    job = start_job(flags, tmp_path / "output.txt")
    try:
        job.wait_for(lambda: "step    3/5000" in job.text(), seconds=180.0)
        # As torchrun and Slurm do.
        os.killpg(job.workers()[1].pid, signal.SIGTERM)
        assert job.end() == 0
    finally:
        job.close()
    assert inspect(save)["iteration"] >= 3


def test_a_duration_ends_the_run_with_a_checkpoint(tmp_path):
    flags = [*FLAGS, "--save", str(tmp_path / "save"), "--run-dir", str(tmp_path / "run")]
    job = start_job([*flags, "--exit-duration-in-mins", "0.02"], tmp_path / "output.txt")
    try:
        assert job.end() == 0
    finally:
        job.close()
    assert "--exit-duration-in-mins 0.02" in job.text()
    assert inspect(tmp_path / "save")["iteration"] > 0


def test_without_the_handler_a_signal_ends_the_job_at_once(tmp_path):
    flags = [*FLAGS, "--save", str(tmp_path / "save"), "--run-dir", str(tmp_path / "run")]
    job = start_job([*flags, "--no-exit-signal-handler"], tmp_path / "output.txt")
    try:
        job.wait_for(lambda: "| loss" in job.text())
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM
    finally:
        job.close()
    assert "stopped by SIGTERM" in job.text()
    assert "Traceback" not in job.text()


ALONE = (
    "--platform cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 1 --mock-data --num-workers 1 --lr 1e-3 --train-iters 100000 "
    "--eval-iters 0 --no-progress"
).split()


def test_no_process_outlives_a_killed_training(tmp_path):
    job = start_job([*ALONE, "--run-dir", str(tmp_path / "run")], tmp_path / "output.txt")
    try:
        job.wait_for(lambda: "| loss " in job.text())
        started = psutil.Process(job.process.pid).children(recursive=True)
        assert started
        job.process.send_signal(signal.SIGKILL)
        assert psutil.wait_procs(started, timeout=20.0)[1] == []
    finally:
        job.close()

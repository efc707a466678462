"""Ctrl-C: once, the run saves after its step and ends; twice, it ends at once; ever with what is saved."""

from __future__ import annotations

import re
import shlex
import signal
from contextlib import suppress

import psutil
import pytest

from mindspeed_testing.faults import start_job
from mindspeed_train.checkpoint.inspection import inspect

FLAGS = shlex.split(
    "--platform cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 1 --lr 1e-3 --train-iters 1000000 "
    "--eval-iters 0 --no-progress --save-interval 5 --keep-last-n 2"
)
ALONE, SUPERVISED = pytest.param([], id="alone"), pytest.param(["--nproc", "2"], id="supervised")
BOTH = [ALONE, SUPERVISED]
FIRST_ALONE = [ALONE, pytest.param(["--nproc", "2"], id="supervised", marks=pytest.mark.thorough)]
FIRST_SUPERVISED = [pytest.param([], id="alone", marks=pytest.mark.thorough), SUPERVISED]
LAST = re.compile(r"last saved: step (\d+) in (\S+); run folder: (\S+)\n\Z")


def start(tmp_path, *own, **options):
    flags = [*FLAGS, *own, "--save", str(tmp_path / "save"), "--run-dir", str(tmp_path / "run")]
    job = start_job(flags, tmp_path / "output.txt", **options)
    job.wait_for(lambda: job.text().count("saved ") > 1, seconds=120.0)
    return job


def check_last_line(job, tmp_path):
    step, checkpoint, folder = LAST.search(job.text()).groups()
    assert folder == str(tmp_path / "run")
    found = inspect(tmp_path / "save")
    assert found["problems"] == []
    assert found["iteration"] == int(step)
    assert checkpoint == str(tmp_path / "save" / f"iter_{int(step):07d}")
    return int(step)


@pytest.mark.parametrize("processes", BOTH)
def test_the_first_ctrl_c_saves_the_step_that_is_under_way(tmp_path, processes):
    job = start(tmp_path, *processes)
    try:
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130
    finally:
        job.close()
    text = job.text()
    assert text.count("SIGINT: the run saves and ends after this step; again to stop at once") == 1
    assert "received SIGINT" in text
    assert "Traceback" not in text
    assert f"stopping after step {check_last_line(job, tmp_path)}: " in text


@pytest.mark.parametrize("processes", FIRST_ALONE)
def test_the_second_ctrl_c_ends_a_run_whose_step_never_ends(tmp_path, processes):
    job = start(tmp_path, *processes)
    try:
        trainer = job.workers()[-1] if processes else job.process
        (loader,) = psutil.Process(trainer.pid).children()
        loader.send_signal(signal.SIGSTOP)
        job.process.send_signal(signal.SIGINT)
        job.wait_for(lambda: "again to stop at once" in job.text())

        def press():
            # Two that come together are one; the first of them may be enough.
            with suppress(ProcessLookupError):
                job.process.send_signal(signal.SIGINT)
            return not job.pause(0.2)

        job.wait_for(press)
        assert job.end() == 130
    finally:
        job.close()
    check_last_line(job, tmp_path)
    assert "Traceback" not in job.text()


@pytest.mark.parametrize("processes", FIRST_SUPERVISED)
def test_a_run_under_nohup_outlives_its_terminal_and_others_save(tmp_path, processes):
    job = start(tmp_path, *processes, ignored=[signal.SIGHUP])
    try:
        before = job.text().count("saved ")
        job.process.send_signal(signal.SIGHUP)
        job.wait_for(lambda: job.text().count("saved ") > before + 1)
        job.process.send_signal(signal.SIGUSR1)
        assert job.end() == 0
    finally:
        job.close()
    assert "received SIGUSR1" in job.text()
    check_last_line(job, tmp_path)


def test_a_closed_terminal_saves_and_ends_the_run(tmp_path):
    job = start(tmp_path)
    try:
        job.process.send_signal(signal.SIGHUP)
        assert job.end() == 0
    finally:
        job.close()
    assert "received SIGHUP" in job.text()
    check_last_line(job, tmp_path)


@pytest.mark.thorough
def test_ctrl_c_under_torchrun_saves_the_step_that_is_under_way(tmp_path):
    torchrun = shlex.split("--standalone --nproc-per-node 2 -m mindspeed_core.train")
    flags = [*torchrun, *FLAGS, "--save", str(tmp_path / "save"), "--run-dir", str(tmp_path / "run")]
    job = start_job(flags, tmp_path / "output.txt", program="torch.distributed.run")
    try:
        job.wait_for(lambda: job.text().count("saved ") > 1, seconds=300.0)
        job.process.send_signal(signal.SIGINT)
        # torchrun says in a traceback that it got the signal.
        assert job.end(120.0) != 0
    finally:
        job.close()
    text = job.text()
    step, _, _ = re.search(r"last saved: step (\d+) in (\S+); run folder: (\S+)\n", text).groups()
    assert f"stopping after step {step}: received SIGINT" in text
    assert inspect(tmp_path / "save")["iteration"] == int(step)

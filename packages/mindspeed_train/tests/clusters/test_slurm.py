"""The batch script for Slurm: read by shellcheck, and run with a stand-in for Slurm."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import slurm_standin

from mindspeed_testing.faults import KillReport, read_steps

SCRIPT = Path(__file__).resolve().parents[4] / "examples" / "clusters" / "slurm" / "train.sbatch"
TWO_TASKS = ("--nodes=1", "--gres=none", "--ntasks-per-node=2", "--cpus-per-task=1")
STEPS = 400
FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 1 --lr 1e-3 "
    f"--train-iters {STEPS} --eval-iters 0 --attention-dropout 0.1 --hidden-dropout 0.1 --no-progress"
).split()
TRAINING = f'exec {sys.executable} -m mindspeed_core.train "$@"'


class Submitted:
    """A job of the batch script with two tasks, from ``sbatch`` to its last attempt."""

    def __init__(self, folder: Path, program: str, *arguments: str) -> None:
        """Submit the script; ``program`` is what ``mindspeed-train`` does in a task, in bash."""
        self._folder = folder
        environment = slurm_standin.install(folder / "bin")
        slurm_standin.write_program(folder / "bin" / "mindspeed-train", program)
        self._process = subprocess.Popen(
            [str(folder / "bin" / "sbatch"), *TWO_TASKS, str(SCRIPT), *arguments],
            cwd=folder,
            env={**environment, "PLATFORM": "cpu", "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Submitted:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            slurm_standin.signal_tasks(self._folder / "bin", signal.SIGKILL)

    def text(self) -> str:
        output = self._folder / "pretrain-4711.out"
        return output.read_text(errors="replace") if output.exists() else ""

    def wait_for(self, condition: Callable[[str], bool], seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not condition(self.text()):
            assert time.monotonic() < end, self.text()
            try:
                self._process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
            assert condition(self.text()), self.text()

    def time_limit_is_near(self) -> None:
        self._process.send_signal(signal.SIGUSR1)

    def grace_period_begins(self) -> None:
        self._process.send_signal(signal.SIGUSR2)

    def end(self) -> int:
        return self._process.wait(120)


def report_of(text: str) -> KillReport:
    report = KillReport()
    read_steps(text, report)
    return report


def last_step(text: str) -> int:
    return max(report_of(text).printed, default=0)


def starts(text: str) -> int:
    return text.count("started")


def test_shellcheck_finds_nothing():
    program = Path(sys.executable).parent / "shellcheck"
    found = subprocess.run([program, "--severity=style", SCRIPT], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_training_is_saved_before_it_has_to_go_requeued_and_finished(tmp_path):
    with Submitted(tmp_path, TRAINING, *FLAGS) as job:
        job.wait_for(lambda text: last_step(text) >= 5)
        job.time_limit_is_near()
        job.wait_for(lambda text: "training from step " in text)
        resumed = last_step(job.text())
        job.wait_for(lambda text: last_step(text) >= resumed + 5)
        job.grace_period_begins()
        assert job.end() == 0
        text = job.text()
    stops = re.findall(r"stopping after step (\d+): received (\w+)", text)
    assert [name for _, name in stops] == ["SIGUSR1", "SIGTERM"]
    assert re.findall(r"training from step (\d+)", text) == [step for step, _ in stops]
    assert text.count("requeueing job 4711") == 2
    assert sorted(report_of(text).printed) == list(range(1, STEPS + 1))
    assert report_of(text).contradictions == []
    manifest = tmp_path / f"pretrain/checkpoints/iter_{STEPS:07}/manifest.json"
    assert json.loads(manifest.read_text())["job"] == "slurm:4711"


@pytest.mark.parametrize("way", ["time_limit_is_near", "grace_period_begins"])
def test_a_job_that_was_stopped_is_requeued_and_one_that_ended_is_not(tmp_path, way):
    first = 'trap "exit 0" USR1 TERM; echo started; while :; do read -rt 0.05 <> <(:) || true; done'
    program = f"[[ ${{SLURM_RESTART_COUNT:-}} ]] && {{ echo started again; exit 0; }}; {first}"
    with Submitted(tmp_path, program) as job:
        job.wait_for(lambda text: starts(text) == 2)
        getattr(job, way)()
        assert job.end() == 0
        assert job.text().count("requeueing") == 1
        assert job.text().count("started again") == 2


def test_a_failed_task_ends_the_other_one_and_the_job(tmp_path):
    program = "echo started; ((SLURM_PROCID)) && exit 3; while :; do read -rt 0.05 <> <(:) || true; done"
    with Submitted(tmp_path, program) as job:
        assert job.end() != 0
        assert starts(job.text()) == 2
        assert "requeueing" not in job.text()


def test_flags_and_sites_options_arrive_as_they_were_given(tmp_path, monkeypatch):
    monkeypatch.setenv("SRUN_OPTIONS", "--container-image=train.sqsh")
    with Submitted(tmp_path, 'printf "%s|" "$@"; echo', "--data-path", "my data/a *") as job:
        assert job.end() == 0
        line = job.text().splitlines()[0]
    folder = tmp_path / "pretrain"
    assert line == (
        f"--platform|cpu|--save|{folder}/checkpoints|--load|{folder}/checkpoints|--run-dir|{folder}/run|"
        "--data-path|my data/a *|"
    )

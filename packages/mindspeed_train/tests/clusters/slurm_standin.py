"""A stand-in for Slurm with one node: ``sbatch``, ``srun`` and ``scontrol`` as a batch script sees them.

``sbatch`` stays in the foreground and runs the script, again after every requeue. Sent to it, SIGUSR1 means
that the time limit is near, SIGUSR2 that a grace period before preemption begins. What each program does with
signals was observed with Slurm 22.05.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

JOB = "4711"
FOLDER = "SLURM_STANDIN"
"""Variable with the folder in which the three programs leave word for each other."""


def batch_parser() -> argparse.ArgumentParser:
    """Options of sbatch, a part of them; another one is an error."""
    parser = argparse.ArgumentParser("sbatch", allow_abbrev=False)
    for name, default in (("nodes", "1"), ("ntasks-per-node", "1"), ("cpus-per-task", "1")):
        parser.add_argument(f"--{name}", type=int, default=int(default))
    for name in ("job-name", "gres", "time", "signal", "output", "open-mode", "partition"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--requeue", action="store_true")
    return parser


def directives(script: Path) -> list[str]:
    """Options in a script: the lines before its first command."""
    found: list[str] = []
    for line in script.read_text().splitlines():
        if line.startswith("#SBATCH "):
            found += shlex.split(line.removeprefix("#SBATCH "))
        elif line.strip() and not line.startswith("#"):
            break
    return found


def sbatch(arguments: list[str]) -> int:
    end = next(i for i, argument in enumerate(arguments) if not argument.startswith("-"))
    script, parser = Path(arguments[end]), batch_parser()
    options = parser.parse_args(directives(script) + arguments[:end])
    assert options.nodes == 1, "the stand-in has one node"
    name = options.job_name or script.name
    output = Path(options.output.replace("%x", name).replace("%j", JOB))
    script_signal = options.signal.removeprefix("B:").partition("@")[0]
    assert options.signal.startswith("B:"), "without B: the tasks get it, and not the script"
    folder = Path(os.environ[FOLDER])
    environment = {
        **os.environ,
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NAME": name,
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS": str(options.ntasks_per_node),
        "SLURM_NTASKS_PER_NODE": str(options.ntasks_per_node),
        "SLURM_CPUS_PER_TASK": str(options.cpus_per_task),
    }
    batch: subprocess.Popen[bytes] | None = None

    def time_limit_is_near(number: int, frame: object) -> None:
        if batch is not None:
            batch.send_signal(signal.Signals[f"SIG{script_signal}"])

    def grace_period_begins(number: int, frame: object) -> None:
        (folder / "preempted").touch()
        signal_tasks(folder, signal.SIGTERM)

    signal.signal(signal.SIGUSR1, time_limit_is_near)
    signal.signal(signal.SIGUSR2, grace_period_begins)
    for restart in range(100):
        for word in ("requeued", "preempted"):
            (folder / word).unlink(missing_ok=True)
        if restart:
            environment["SLURM_RESTART_COUNT"] = str(restart)
        with output.open("ab" if options.open_mode == "append" else "wb") as file:
            command = ["bash", str(script), *arguments[end + 1 :]]
            batch = subprocess.Popen(
                command, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            (folder / "batch").write_text(str(batch.pid))
            status = batch.wait()
        if not (folder / "requeued").exists():
            return status if status >= 0 else 128 - status
        assert options.requeue, "a job that may not be requeued"
    return 99


def srun(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("srun", allow_abbrev=False)
    parser.add_argument("--kill-on-bad-exit", type=int, default=0)
    parser.add_argument("--container-image")
    end = next(i for i, argument in enumerate(arguments) if not argument.startswith("-"))
    options = parser.parse_args(arguments[:end])
    count = int(os.environ["SLURM_NTASKS"])
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_NODEID": "0",
    }
    # Until the handlers stand, signals wait.
    handled = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    tasks = []
    for rank in range(count):
        task = {**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        tasks.append(
            subprocess.Popen(
                arguments[end:],
                env={**os.environ, **task},
                start_new_session=True,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, handled),
            )
        )
    folder = Path(os.environ[FOLDER])
    (folder / "tasks").write_text(" ".join(str(task.pid) for task in tasks))
    for number in handled:
        sent = number if number == signal.SIGUSR1 else signal.SIGKILL
        signal.signal(number, lambda _, frame, sent=sent: signal_tasks(folder, sent))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    worst = 0
    for _ in tasks:
        pid, waited = os.wait()
        status = os.waitstatus_to_exitcode(waited)
        task = next(task for task in tasks if task.pid == pid)
        task.returncode = status
        worst = max(worst, status if status >= 0 else 128 - status)
        if status and options.kill_on_bad_exit:
            for other in tasks:
                other.poll() is None and other.terminate()
    return worst


def scontrol(arguments: list[str]) -> int:
    folder = Path(os.environ[FOLDER])
    if arguments == ["show", "job", JOB]:
        when = "2026-01-01T00:00:00" if (folder / "preempted").exists() else "None"
        print(f"JobId={JOB} JobName=pretrain\n   PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime={when}")
        return 0
    assert arguments == ["requeue", JOB], arguments
    (folder / "requeued").touch()
    os.kill(int((folder / "batch").read_text()), signal.SIGTERM)
    return 0


def signal_tasks(folder: Path, number: int) -> None:
    """Signal every process of every task, as Slurm does."""
    for pid in (folder / "tasks").read_text().split():
        with suppress(ProcessLookupError):
            os.killpg(int(pid), number)


def install(folder: Path) -> dict[str, str]:
    """Put the programs into a folder; the environment in which they are found first."""
    folder.mkdir()
    for program in ("sbatch", "srun", "scontrol"):
        write_program(folder / program, f'exec {sys.executable} {__file__} {program} "$@"')
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, FOLDER: str(folder), "SLURM_JOB_ID": ""}


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2:]))

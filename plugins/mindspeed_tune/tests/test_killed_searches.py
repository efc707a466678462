"""Searches of whole processes that end before they are done: what is left of them, and where they go on."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest

PROGRAM = [sys.executable, "-c", "from mindspeed_tune.command import program; program()"]
SPACE = """
[flags]
"--tensor-model-parallel-size" = [1, 2]
"--pipeline-model-parallel-size" = [1, 2]
"--micro-batch-size" = [1]
"--recompute-granularity" = [false]
"--use-distributed-optimizer" = [true]
"--overlap-grad-reduce" = [false]
"--overlap-param-gather" = [false]
"--num-layers-per-virtual-pipeline-stage" = [false]
"""
COMMAND = (
    "mindspeed-train --fake-world-size 4 --mock-data --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --vocab-size 256 --position-embedding-type rope --bf16 --micro-batch-size 1 "
    "--global-batch-size 16 --train-iters 2 --lr 1e-3 --attention-dropout 0"
)
KILLS = 10


@pytest.fixture
def started(tmp_path):
    """Starts a search in a session of its own, on a journal in a folder."""
    space = tmp_path / "space.toml"
    space.write_text(SPACE)
    running = []

    def start(folder):
        options = ["--tune-hardware", "h100", "--tune-space", str(space), "--tune-work-dir", str(folder)]
        options += ["--tune-trials", "2", "--no-tune-features", "--json"]
        process = subprocess.Popen(
            [*PROGRAM, "search", *options, "--", *shlex.split(COMMAND)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def alive(session):
    """Return whether any process of a session is left."""
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def ends(session, seconds=60.0):
    """Return whether all processes of a session end in time."""
    until = time.monotonic() + seconds
    while alive(session) and time.monotonic() < until:
        threading.Event().wait(0.05)
    return not alive(session)


def report_of(process):
    out, told = process.communicate(timeout=600)
    assert process.returncode == 0, told[-3000:]
    return json.loads(out)


def lines(folder):
    file = folder / "journal.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.mark.thorough
def test_a_search_killed_at_ten_random_times_ends_with_the_same_report(started, tmp_path):
    began = time.monotonic()
    expected = report_of(started(tmp_path / "whole"))
    seconds = time.monotonic() - began
    chosen = random.Random(37)
    known = [0]
    for _ in range(KILLS):
        process = started(tmp_path / "killed")
        try:
            process.communicate(timeout=chosen.uniform(0.1, 1.0) * seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        assert ends(process.pid), "ranks of a killed search run on"
        known.append(lines(tmp_path / "killed"))
    assert known == sorted(known)
    assert known[-1] > 1
    assert report_of(started(tmp_path / "killed")) == expected


@pytest.mark.thorough
def test_ctrl_c_leaves_no_process_and_what_was_found_is_kept(started, tmp_path):
    folder = tmp_path / "journal"
    process = started(folder)
    while lines(folder) < 2:
        assert process.poll() is None, process.communicate()[1]
        threading.Event().wait(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Traceback" not in told
    assert ends(process.pid)
    assert lines(folder) >= 2

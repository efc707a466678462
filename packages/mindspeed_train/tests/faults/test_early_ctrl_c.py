"""Ctrl-C at any moment of a start ends the program, and nothing crashes by it.

A moment is a line of what the program prints while Python names each module that it has imported: so it does
not depend on how fast the machine is.
"""

from __future__ import annotations

import random
import re
import shlex
import signal
import subprocess
import sys
from itertools import islice

import pytest

from mindspeed_train.launch import supervisor

FLAGS = shlex.split(
    "--platform cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --lr 1e-3 --eval-iters 0 "
    "--no-progress --train-iters 1000000"
)
OURS = "mindspeed_core.cli"
"""Before this module is imported, Python itself answers."""
LINES = 5000
"""More than a start prints; the others are steps."""
CRASHES = ("Traceback", "KeyboardInterrupt", "Segmentation", "Fatal Python", "Exception ignored")


def interrupt(tmp_path, moment, processes):
    """Send Ctrl-C behind the line of a moment; return the exit status and what was said afterwards."""
    own = ["--save", str(tmp_path / "save"), "--run-dir", str(tmp_path / "run")]
    program = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "mindspeed_core.train", *FLAGS, *own, *processes],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        lines = iter(program.stdout.readline, "")
        while OURS not in next(lines):
            continue
        for _ in islice(lines, moment):
            continue
        program.send_signal(signal.SIGINT)
        said = program.communicate(timeout=300.0)[0]
        return program.returncode, re.sub(r"^import time.*\n", "", said, flags=re.MULTILINE)
    finally:
        program.kill()
        program.wait()


def check(status, said, moment):
    assert status in (-signal.SIGINT, supervisor.EXIT_INTERRUPTED), f"line {moment}: {status}\n{said}"
    assert not any(word in said for word in CRASHES), f"line {moment}: {said}"


@pytest.mark.parametrize(
    ("moment", "processes"),
    [
        pytest.param(700, [], id="alone"),
        pytest.param(1000, ["--nproc", "2"], id="two", marks=pytest.mark.thorough),
    ],
)
def test_ctrl_c_while_torch_is_imported_ends_the_program_without_a_traceback(tmp_path, moment, processes):
    check(*interrupt(tmp_path, moment, processes), moment)


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [[], ["--nproc", "2"]], ids=["alone", "two"])
def test_ctrl_c_at_a_hundred_moments_of_a_start_is_never_lost(tmp_path, processes):
    choice = random.Random(42)
    for number in range(100):
        moment = choice.randrange(LINES)
        check(*interrupt(tmp_path / str(number), moment, processes), moment)

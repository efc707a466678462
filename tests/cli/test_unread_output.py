"""``… | head``: a program whose output nobody reads any more ends quietly."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mindspeed_core.cli.features import COMMANDS

FEATURES, TRAIN = "mindspeed_core.cli.features", "mindspeed_core.train"


def end_unread(module: str, *arguments: str) -> tuple[int, bytes]:
    """Run a program whose output has no reader; its exit status and what it says on standard error."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments], stdout=writing, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        (FEATURES, "--help"),
        (FEATURES, "list"),
        (FEATURES, "list", "--json"),
        (FEATURES, "plan", "--", "--num-layers", "2"),
        (FEATURES, "graph"),
        (TRAIN, "--help"),
        (TRAIN, "inspect", "--help"),
        (TRAIN, "--num-layers", "2", "--plan-only"),
    ],
    ids=" ".join,
)
def test_a_program_that_nobody_reads_ends_quietly_like_one_that_sigpipe_ended(command):
    assert end_unread(*command) == (141, b"")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_sub_command_ends_quietly(name):
    assert end_unread(FEATURES, name, "--help") == (141, b"")


def test_an_error_is_said_although_nobody_reads_the_output():
    status, said = end_unread(FEATURES, "show", "no-such-feature")

    assert status == 2
    assert said.startswith(b"error: no feature 'no-such-feature'")

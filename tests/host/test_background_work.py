"""A forked piece of work gives its result whole, or the trainer learns within a bound how it was lost."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil
import pytest
import torch

from mindspeed_core.hosts.standalone.checkpoint.background import BackgroundWork, WorkerLost
from mindspeed_core.hosts.standalone.checkpoint.forking import kept_out_of_forks
from mindspeed_core.hosts.standalone.checkpoint.staging import Staging

LONG = 60.0


class Gate:
    """Holds a forked process until the parent lets it pass, and tells the parent that it got there."""

    def __init__(self):
        self.arrived, self.arrives = os.pipe()
        self.opened, self.opens = os.pipe()

    def hold(self):
        os.write(self.arrives, b"x")
        os.read(self.opened, 1)

    def wait_until_held(self):
        assert os.read(self.arrived, 1) == b"x"

    def open(self):
        os.write(self.opens, b"x")


@pytest.fixture
def started():
    """Start work; what still runs at the end is killed."""
    works = []

    def start(function, limit=LONG):
        works.append(BackgroundWork(function, limit=limit, explain=str))
        return works[-1]

    yield start
    for work in works:
        work.kill()


def end(work, seconds=20.0):
    """Look at the work until it has ended."""
    latest = time.monotonic() + seconds
    while work.running():
        assert time.monotonic() < latest, "not found in time"
        work.wait(0.02)
    return work


def lost(work):
    with pytest.raises(WorkerLost) as caught:
        end(work).result()
    return str(caught.value)


def test_a_result_longer_than_a_pipe_arrives(started):
    assert end(started(lambda beat: "x" * 1_000_000)).result() == "x" * 1_000_000


def test_an_error_of_the_work_arrives_as_its_phrase(started):
    def fails(beat):
        raise OSError("no space left")

    assert lost(started(fails)) == "no space left"


@pytest.mark.parametrize("moment", ["before its first byte", "while it works", "before it reports"])
def test_a_killed_process_is_named_with_its_signal(started, tmp_path, moment):
    gate = Gate()

    def work(beat):
        with (tmp_path / "file").open("wb") as file:
            for part in ("before its first byte", "while it works", "before it reports"):
                if part == moment:
                    gate.hold()
                file.write(b"1")
                beat()

    process = started(work)
    gate.wait_until_held()
    os.kill(process.pid, signal.SIGKILL)
    text = lost(process)
    assert f"process {process.pid}" in text
    assert "was killed by SIGKILL before it was done" in text


def test_half_a_result_is_no_result(started):
    process = started(lambda beat: "x" * 10_000_000)
    # More than a pipe holds: it cannot end before the parent has read.
    process.wait(20.0)
    os.kill(process.pid, signal.SIGKILL)
    assert "SIGKILL" in lost(process)


def test_an_exit_code_is_named(started):
    assert "ended with exit code 3" in lost(started(lambda beat: os._exit(3)))


def test_a_stopped_process_is_found_and_ended(started):
    gate = Gate()
    process = started(lambda beat: gate.hold(), limit=0.5)
    gate.wait_until_held()
    os.kill(process.pid, signal.SIGSTOP)
    assert "made no progress for 0.5 s and was killed" in lost(process)
    assert not psutil.pid_exists(process.pid)


def test_progress_keeps_slow_work_alive(started):
    def slow(beat):
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            beat()
        return "done"

    assert end(started(slow, limit=1.0)).result() == "done"


def test_the_writer_ends_with_its_trainer():
    gate = Gate()
    told, tells = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        with contextlib.suppress(BaseException):
            work = BackgroundWork(lambda beat: gate.hold(), limit=LONG, explain=str)
            gate.wait_until_held()
            os.write(tells, work.pid.to_bytes(8, "little"))
            os.waitpid(work.pid, 0)
        os._exit(0)
    writer = psutil.Process(int.from_bytes(os.read(told, 8), "little"))
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    writer.wait(20.0)


def test_a_copy_is_that_moments_whatever_the_trainer_writes(started):
    gate = Gate()
    tensor = torch.arange(100_000, dtype=torch.float32)
    view = tensor.view(10, 10_000)[:, 1:3]
    copies = Staging().copy([tensor, view, torch.empty(0, 3)], torch.empty)
    with kept_out_of_forks([tensor]):
        process = started(lambda beat: (gate.hold(), [copy.tolist() for copy in copies])[1])
    gate.wait_until_held()
    tensor.zero_()
    gate.open()
    whole, part, empty = end(process).result()
    assert whole == list(map(float, range(100_000)))
    assert part == [[10_000.0 * row + 1, 10_000.0 * row + 2] for row in range(10)]
    assert empty == []


def test_copies_share_no_storage():
    copies = Staging().copy([torch.ones(3), torch.ones(5, dtype=torch.bfloat16), torch.ones(())], torch.empty)
    assert [copy.untyped_storage().nbytes() for copy in copies] == [12, 10, 4]

"""Work beside training gives its result whole, or the trainer learns within a bound how it was lost."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import background_jobs
import psutil
import pytest
import torch
from background_jobs import PARTS
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_testing.held_writer import Gate
from mindspeed_train.checkpoint import background, background_main, staging
from mindspeed_train.checkpoint.background import BackgroundProcess
from mindspeed_train.checkpoint.processes import CoreTime
from mindspeed_train.checkpoint.reasons import WorkerLost
from mindspeed_train.checkpoint.staging import Staging

LONG = 60.0


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


@pytest.fixture
def beside():
    """Make a process that does a kind of work; what still lives at the end is killed."""
    made = []

    def make(function, limit=LONG):
        made.append(BackgroundProcess(f"{background_jobs.__name__}:{function.__name__}", limit=limit))
        return made[-1]

    yield make
    for process in made:
        process.close()


def started(process, **job):
    process.start(job)
    return process


def end(process, seconds=20.0):
    """Look at the work until it has ended."""
    latest = time.monotonic() + seconds
    while process.running():
        assert time.monotonic() < latest, "not found in time"
        process.wait(0.02)
    return process


def lost(process):
    with pytest.raises(WorkerLost) as caught:
        end(process).result()
    return str(caught.value)


def test_a_result_longer_than_a_pipe_arrives(beside):
    process = started(beside(background_jobs.repeat), count=1_000_000)
    assert end(process).result() == "x" * 1_000_000


def test_an_error_of_the_work_arrives_as_its_phrase(beside):
    assert lost(started(beside(background_jobs.fail))).endswith("no space left")


@pytest.mark.parametrize("moment", PARTS)
def test_a_killed_process_is_named_with_its_signal(beside, gate, tmp_path, moment):
    gate.hold(moment)
    process = started(beside(background_jobs.write_parts), path=str(tmp_path / "file"))
    gate.wait_until_held()
    pid = process.pid
    os.kill(pid, signal.SIGKILL)
    text = lost(process)
    assert f"process {pid}" in text
    assert "was killed by SIGKILL before it was done" in text


def test_half_a_result_is_no_result(beside):
    process = started(beside(background_jobs.repeat), count=10_000_000)
    # More than a pipe holds: it cannot end before the parent has read.
    process.wait(20.0)
    os.kill(process.pid, signal.SIGKILL)
    assert "SIGKILL" in lost(process)


def test_an_exit_code_is_named(beside):
    assert "ended with exit code 3" in lost(started(beside(background_jobs.end_early)))


def test_a_stopped_process_is_found_and_ended(beside, gate, tmp_path):
    gate.hold(PARTS[0])
    process = started(beside(background_jobs.write_parts, limit=0.5), path=str(tmp_path / "file"))
    gate.wait_until_held()
    pid = process.pid
    os.kill(pid, signal.SIGSTOP)
    assert "made no progress for 0.5 s and was killed" in lost(process)
    assert not psutil.pid_exists(pid)


def _gets_no_core(now):
    return CoreTime(is_ready=True, ran=7, queued=7)


def _gets_little(now):
    return CoreTime(is_ready=True, ran=now // 10, queued=now - now // 10)


def _spins(now):
    return CoreTime(is_ready=True, ran=now)


@pytest.mark.parametrize(("gets", "hangs"), [(_gets_no_core, False), (_gets_little, False), (_spins, True)])
def test_time_in_the_queue_for_a_core_is_no_hanging(beside, gate, tmp_path, monkeypatch, gets, hangs):
    monkeypatch.setattr(background, "core_time_of", lambda pid: gets(time.monotonic_ns()))
    gate.hold(PARTS[0])
    process = started(beside(background_jobs.write_parts, limit=0.5), path=str(tmp_path / "file"))
    gate.wait_until_held()
    until = time.monotonic() + 1.5
    while process.running() and time.monotonic() < until:
        process.wait(0.02)
    assert process.failed == hangs


def test_progress_keeps_slow_work_alive(beside):
    process = beside(background_jobs.take_long, limit=1.0)
    process.start({"seconds": 1.5})
    assert end(process).result() == "done"


def test_one_process_does_one_piece_of_work_after_another(beside):
    process = beside(background_jobs.describe)
    first, second = (end(started(process)).result() for _ in range(2))
    assert first == second
    assert first["pid"] == process.pid


@pytest.mark.parametrize("moment", ["while it works", "between two pieces of work"])
def test_the_next_piece_of_work_after_a_loss_has_a_new_process(beside, gate, tmp_path, moment):
    process = beside(background_jobs.write_parts)
    if moment == "while it works":
        gate.hold(PARTS[1])
        started(process, path=str(tmp_path / "first"))
        gate.wait_until_held()
        os.kill(process.pid, signal.SIGKILL)
        assert "SIGKILL" in lost(process)
        gate.forget()
    else:
        end(started(process, path=str(tmp_path / "first")))
        pid = process.pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end(started(process, path=str(tmp_path / "second"))).result() is None
    assert (tmp_path / "second").read_bytes() == b"111"


def test_the_process_yields_to_training_and_loads_nothing_large(beside):
    described = end(started(beside(background_jobs.describe))).result()
    assert (described["nice"], described["heavy"]) == (19, [])


@pytest.mark.parametrize("number", background_main.IGNORED)
def test_signals_of_the_trainer_do_not_end_the_work(beside, gate, tmp_path, number):
    gate.hold(PARTS[1])
    process = started(beside(background_jobs.write_parts), path=str(tmp_path / "file"))
    # At its start too, before the process can ignore anything.
    os.kill(process.pid, number)
    gate.wait_until_held()
    os.kill(process.pid, number)
    gate.open()
    assert end(process).result() is None


def test_the_process_ends_with_its_trainer(gate, tmp_path):
    gate.hold(PARTS[0])
    told, tells = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        with contextlib.suppress(BaseException):
            process = BackgroundProcess("background_jobs:write_parts", limit=LONG)
            process.start({"path": str(tmp_path / "file")})
            gate.wait_until_held()
            os.write(tells, process.pid.to_bytes(8, "little"))
            os.waitpid(process.pid, 0)
        os._exit(0)
    writer = psutil.Process(int.from_bytes(os.read(told, 8), "little"))
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    writer.wait(20.0)


def test_nothing_is_left_of_a_closed_process(beside, gate, tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    process = BackgroundProcess("background_jobs:write_parts", limit=LONG)
    gate.hold(PARTS[0])
    process.start({"path": str(tmp_path / "file")})
    gate.wait_until_held()
    pid = process.pid
    process.close()
    assert not psutil.pid_exists(pid)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "pinned", [None, lambda shape, dtype: torch.empty(shape, dtype=dtype)], ids=["host", "device"]
)
def test_a_copy_is_that_moments_whatever_the_trainer_writes(beside, gate, pinned):
    tensor = torch.arange(100_000).to(torch.uint8)
    view = tensor.view(10, 10_000)[:, 1:3]
    half = torch.ones(5, dtype=torch.bfloat16)
    process = beside(background_jobs.read)
    copies = Staging(process, pinned)
    places = copies.copy([tensor, view, torch.empty(0, 3), half])
    gate.hold(PARTS[0])
    process.start({"places": places}, copies.share)
    gate.wait_until_held()
    tensor.zero_()
    gate.open()
    whole, part, empty, ones = end(process).result()
    assert whole == [number % 256 for number in range(100_000)]
    assert part == [(10_000 * row + column) % 256 for row in range(10) for column in (1, 2)]
    assert empty == []
    assert ones == [128, 63] * 5


def test_threads_copy_everything_between_them(beside, monkeypatch):
    monkeypatch.setattr(staging, "_LEAST_PER_THREAD", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    tensors = [torch.full((count,), count, dtype=torch.uint8) for count in (7, 90, 0, 1, 30, 2)]
    process = beside(background_jobs.read)

    places = Staging(process).copy(tensors)

    assert end(started(process, places=places)).result() == [tensor.tolist() for tensor in tensors]


@given(st.lists(st.integers(0, 50)), st.integers(1, 6))
def test_shares_cover_the_tensors_in_order(lengths, parts):
    shares = staging._shares(lengths, parts)

    assert 1 <= len(shares) <= parts
    assert [i for share in shares for i in range(len(lengths))[share]] == list(range(len(lengths)))


@pytest.mark.parametrize(("ranks", "threads"), [("1", 4), ("2", 2), ("3", 1), ("8", 1)])
def test_ranks_of_a_host_share_its_cores(monkeypatch, ranks, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(5), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)

    assert staging._threads(1 << 30) == threads


def test_copies_of_another_form_have_room(beside):
    process = beside(background_jobs.read)
    copies = Staging(process)
    for count in (3, 70_000, 5):
        tensor = torch.full((count,), count % 256, dtype=torch.uint8)
        found = end(started(process, places=copies.copy([tensor]))).result()
        assert found == [[count % 256] * count]


def test_a_copy_that_fails_beside_training_is_lost(beside):
    def refuse():
        raise RuntimeError("the device is gone")

    process = beside(background_jobs.read)
    process.start({"places": []}, refuse)
    assert lost(process) == "RuntimeError: the device is gone"


def test_a_process_whose_parent_reads_no_more_ends_without_a_word(beside, gate, tmp_path, capfd):
    gate.hold(PARTS[0])
    process = started(beside(background_jobs.write_parts), path=str(tmp_path / "file"))
    gate.wait_until_held()
    process._process.stdout.close()
    gate.open()
    assert process._process.wait(20.0) == 1
    assert capfd.readouterr().err == ""


def test_a_stopped_process_is_named_long_before_its_limit(beside, gate, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(background, "_NOTICE_SECONDS", 0.5)
    gate.hold(PARTS[0])
    process = started(beside(background_jobs.write_parts), path=str(tmp_path / "file"))
    gate.wait_until_held()
    os.kill(process.pid, signal.SIGSTOP)
    # Nobody looks at it: a step may take long.
    latest = time.monotonic() + 20.0
    while not caplog.messages and time.monotonic() < latest:
        process.wait(0.02)
    (said,) = caplog.messages
    assert f"(process {process.pid}) made no progress for" in said
    assert "(it is stopped by a signal); it is killed after 60 s" in said

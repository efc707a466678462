"""The process that writes in the background is killed or stopped: found, named, and nothing is lost by it."""

from __future__ import annotations

import os
import shlex
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from mindspeed_testing import held_writer
from mindspeed_testing.faults import start_job
from mindspeed_testing.held_writer import MOMENTS
from mindspeed_testing.worlds import run_world
from mindspeed_train.checkpoint import save_folder
from mindspeed_train.checkpoint.inspection import inspect

SMALL = shlex.split(
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --lr 1e-3 --train-iters 100 "
    "--eval-iters 0 --async-save --use-distributed-optimizer"
)
BOUND = 20.0
"""Seconds for what takes a fraction of one on an idle machine; the time-outs of collectives are longer."""


def lose_writer(run, gate, how, moment, victim, blocking):
    """Save in the background, lose the writer of one rank; what was said, and how long the poll took."""
    from mindspeed_core.errors import CheckpointError
    from mindspeed_train.checkpoint.save import Saver

    saver, here = run.session.state(Saver), run.dist.rank == victim
    if here:
        gate.hold(moment)
    run.session.call("save_checkpoint", run=run, reason="interval")
    pid = 0
    if here:
        gate.wait_until_held()
        gate.forget()
        (writer,) = psutil.Process().children()
        pid = writer.pid
        os.kill(pid, how)
    began, text = time.monotonic(), ""
    while not text and time.monotonic() - began < BOUND:
        try:
            saver.poll(blocking=blocking)
        except CheckpointError as error:
            text = str(error)
    seconds = time.monotonic() - began
    return {"text": text, "pid": pid, "seconds": seconds, "children": len(psutil.Process().children())}


def world(directory, cases):
    """Lose writers, one case after another in one run, with a step and a good save after each."""
    import multiprocessing

    import torch.distributed as dist

    from mindspeed_core.activation import activate
    from mindspeed_train import loop
    from mindspeed_train.checkpoint import save
    from mindspeed_train.checkpoint.save import Saver

    multiprocessing.current_process()._config["daemon"] = False
    save.WRITER = held_writer.WORK
    gate = held_writer.Gate(Path(f"{directory}-gate-{os.environ['RANK']}"))
    found = []
    flags = [*SMALL, "--save", directory, "--run-dir", f"{directory}-run", "--hang-timeout-minutes", "0.04"]
    with activate(flags, host="standalone") as session:
        run = loop.setup(session)
        for case in cases:
            run.iteration += 1
            result = lose_writer(run, gate, *case)
            session.call("train_step", run=run)
            result["names"] = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
            # The next save makes a folder of its own as soon as one rank gets there.
            dist.barrier()
            run.iteration += 1
            session.call("save_checkpoint", run=run, reason="interval")
            session.state(Saver).poll(blocking=True)
            result["latest"] = inspect(Path(directory))
            found.append(result)
        loop.teardown(session)
    return found


CASES = [
    (signal.SIGKILL, MOMENTS[0], 0, True),
    (signal.SIGKILL, MOMENTS[1], 1, False),
    (signal.SIGKILL, MOMENTS[2], 1, True),
    (signal.SIGSTOP, MOMENTS[1], 1, True),
    (signal.SIGSTOP, MOMENTS[0], 0, False),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Every case on two ranks, with the results of both."""
    return run_world(world, 2, str(tmp_path_factory.mktemp("pair") / "save"), CASES, timeout=200)


@pytest.fixture(params=range(len(CASES)), ids=lambda number: f"{CASES[number][0].name} {CASES[number][1]}")
def case(request, pair):
    """One case, and what each rank saw of it."""
    return CASES[request.param], [rank[request.param] for rank in pair]


def test_every_rank_names_rank_process_and_signal_of_the_lost_writer(case):
    (how, _, victim, _), ranks = case
    cause = {signal.SIGKILL: "was killed by SIGKILL", signal.SIGSTOP: "made no progress for"}[how]
    assert ranks[0]["text"] == ranks[1]["text"]
    assert f"(rank {victim})" in ranks[0]["text"]
    assert f"(process {ranks[victim]['pid']}) {cause}" in ranks[0]["text"]


def test_a_lost_writer_is_found_within_a_bound(case):
    _, ranks = case
    assert max(rank["seconds"] for rank in ranks) < BOUND


def test_nothing_is_left_of_a_lost_writer_and_the_others(case):
    _, ranks = case
    for rank in ranks:
        assert rank["children"] == 0
        assert {name for name in rank["names"] if name.startswith(".")} <= {save_folder.FILE}


def test_earlier_checkpoints_stay_and_the_next_save_succeeds(pair):
    for number, result in enumerate(pair[0]):
        assert result["latest"]["iteration"] == 2 * number + 2
        assert result["latest"]["problems"] == []
        assert [name for name in result["names"] if name.startswith("iter_")] == [
            f"iter_{step:07d}" for step in range(2, 2 * number + 1, 2)
        ]


@pytest.mark.parametrize("action", ["stop", "continue"])
def test_the_flag_decides_whether_the_job_goes_on(tmp_path, action):
    flags = [*SMALL, "--save", str(tmp_path / "save"), "--save-interval", "1", "--keep-last-n", "1"]
    flags += [
        "--nproc",
        "2",
        "--on-save-failure",
        action,
        "--run-dir",
        str(tmp_path / "run"),
        "--no-progress",
    ]
    flags[flags.index("--train-iters") + 1] = "100000"
    job = start_job(flags, tmp_path / "output.txt")
    killed = []

    def kill_a_writer():
        for worker in job.workers():
            # A worker or its writer may end between any two looks at it.
            with suppress(psutil.NoSuchProcess):
                for writer in worker.children():
                    writer.kill()
                    killed.append(writer.pid)
        return "was killed by SIGKILL" in job.text()

    try:
        job.wait_for(lambda: job.text().count("saved") > 1)
        job.wait_for(kill_a_writer)
        if action == "continue":
            before = len(job.text())
            job.wait_for(lambda: "saved" in job.text()[before:])
            job.process.send_signal(signal.SIGTERM)
            job.end_well()
            assert "training goes on: saving" in job.text()
        else:
            assert job.end() == 1
            assert job.text().count("error:") == 1
    finally:
        job.close()
    assert any(f"(process {pid}) was killed by SIGKILL" in job.text() for pid in killed)
    assert inspect(tmp_path / "save")["problems"] == []
    hidden = {path.name for path in (tmp_path / "save").iterdir() if path.name.startswith(".")}
    # Who ends the others of a failed run does not wait for them to clear it away.
    assert hidden <= {save_folder.FILE}

"""A run whose output for people fails trains on, saves, and has whole lines in its record."""

from __future__ import annotations

import json
import os
import select
import shlex

import pytest

from mindspeed_testing.faults import small_disk, start_job
from mindspeed_train.checkpoint.inspection import inspect

STEPS = 400
FLAGS = shlex.split(
    "--platform cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --lr 1e-3 --eval-iters 0 "
    "--no-progress --train-iters"
)


@pytest.mark.parametrize("output", ["reader gone", "full"])
def test_nobody_reads_the_output(tmp_path, output):
    flags = [*FLAGS, "60", "--save", str(tmp_path / "save"), "--run-dir", str(tmp_path / "run")]
    flags += ["--nproc", "2"]
    where = tmp_path / "pipe"
    if output == "full":
        where.symlink_to("/dev/full")
        job = start_job(flags, where)
    else:
        os.mkfifo(where)
        reading = os.open(where, os.O_RDONLY | os.O_NONBLOCK)
        job = start_job(flags, where)
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        assert poll.poll(60_000)
        os.set_blocking(reading, True)
        with open(reading, encoding="utf-8", closefd=False) as lines:
            # As `head` does.
            while "| loss" not in next(lines):
                continue
        os.close(reading)
    try:
        assert job.process.wait(120.0) == 0
    finally:
        job.close()
    assert inspect(tmp_path / "save")["iteration"] == 60
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 61))


def test_a_full_disk_below_the_record_is_one_warning(tmp_path):
    disk = tmp_path / "disk"
    flags = [*FLAGS, str(STEPS), "--save", str(tmp_path / "save"), "--run-dir", str(disk / "run")]
    with small_disk(disk, "32k") as mounted:
        # Where nothing can be mounted, the record may not grow.
        job = start_job(flags, tmp_path / "output.txt", largest_file=None if mounted else 80_000)
        try:
            assert job.end(120.0) == 0
        finally:
            job.close()
        text = (disk / "run" / "metrics.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in text.splitlines()]
    assert text.endswith("\n")
    assert steps == sorted(steps)
    assert 0 < len(steps) < STEPS
    assert inspect(tmp_path / "save")["iteration"] == STEPS
    if mounted:
        said = job.text()
        assert said.count("training goes on, and what cannot be written is missing") == 1
        assert f"--run-dir {disk / 'run'}: No space left on device" in said
        assert "Traceback" not in said
        assert f"last saved: step {STEPS} in" in said.splitlines()[-1]

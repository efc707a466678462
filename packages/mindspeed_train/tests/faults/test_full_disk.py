"""A disk that fills up while saving: one message, earlier checkpoints intact, training on if asked."""

import os

import pytest

from mindspeed_testing.faults import small_disk, start_job
from mindspeed_train.checkpoint.inspection import inspect

FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 48 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --lr 1e-3 --train-iters 5 "
    "--eval-iters 0 --no-progress --save-interval 1 --nproc 2"
).split()
LARGEST_FILE = 64_000
"""The disk has room for three checkpoints; where none can be mounted, files may not be larger than this."""


def run(tmp_path, *flags):
    """Train on the small disk; the exit status, what was printed, the checkpoints and their problems."""
    disk = tmp_path / "disk"
    with small_disk(disk, "3m") as mounted:
        save = disk / "save"
        whole = [*FLAGS, *flags, "--save", str(save), "--run-dir", str(tmp_path / "run")]
        if not mounted:
            first = start_job([*whole, "--exit-interval", "1"], tmp_path / "first.txt")
            assert first.end(100) == 0
            whole += ["--load", str(save)]
        job = start_job(whole, tmp_path / "output.txt", largest_file=None if mounted else LARGEST_FILE)
        try:
            status = job.end(100)
        finally:
            job.close()
        names = sorted(os.listdir(save))
        return status, job.text(), names, inspect(save)


@pytest.mark.parametrize("mode", [[], ["--async-save"]], ids=["foreground", "background"])
def test_a_full_disk_ends_the_run_and_spares_earlier_checkpoints(tmp_path, mode):
    status, text, names, found = run(tmp_path, *mode)
    assert status == 1
    assert "Traceback" not in text
    assert text.count("error:") == 1
    assert "no space left" in text or "refused a write" in text
    assert not [name for name in names if name.startswith((".tmp-", ".del-"))]
    assert found["iteration"] >= 1
    assert found["problems"] == []


def test_training_goes_on_without_saving_if_asked(tmp_path):
    status, text, _, found = run(tmp_path, "--on-save-failure", "continue")
    assert "training goes on" in text
    assert "step 5/5" in text
    # The last state is not lost in silence.
    assert status == 1
    assert found["problems"] == []

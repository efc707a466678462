"""Resuming continues exactly where a run stopped, and any other layout can take over.

Each world trains, saves, trains on, and resumes several times in one set of processes, since starting one
costs more than everything that happens in it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path

import pytest

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 16 "
    "--vocab-size 64 --make-vocab-size-divisible-by 8 --micro-batch-size 2 --global-batch-size 4 --train-iters 8 "
    "--lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 2 --mock-data --num-workers 0 --eval-iters 0 --platform cpu "
    "--use-cpu-initialization"
).split()
NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]


def open_run(flags, extra_plugins=()):
    from mindspeed_core.activation import activate
    from mindspeed_core.hosts.standalone import loop

    # The ranks of a world are daemons, which may not fork; the writers of a checkpoint are forks.
    multiprocessing.current_process()._config["daemon"] = False
    session = activate([*SMALL, *flags], extra_plugins=extra_plugins)
    return loop.setup(session)


def close_run(run):
    from mindspeed_core.hosts.standalone import loop

    loop.teardown(run.session)
    run.session.close()


def train(run, steps):
    from mindspeed_core.hosts.standalone import checkpoint

    results = []
    for _ in range(steps):
        checkpoint.poll(run)
        result = run.session.call("train_step", run=run)
        run.iteration += 1
        run.consumed_train_samples += run.args.global_batch_size
        rate = run.optimizer.param_groups[0]["lr"]
        results.append((result.losses["lm loss"].hex(), float(result.grad_norm).hex(), float(rate).hex()))
    return results


def save(run, reason="interval"):
    return run.session.call("save_checkpoint", run=run, reason=reason)


class Messages(logging.Handler):
    """What the project said, as text."""

    def __init__(self):
        super().__init__()
        self.said = []
        logging.getLogger("mindspeed_core").addHandler(self)

    def emit(self, record):
        self.said.append(record.getMessage())


def uninterrupted_and_resumed(directory, flags, resume_flags=(), reason="interval"):
    """Train 2, save, train 4 more; then resume from the checkpoint and train 4: both courses."""
    save_flags = ["--save", directory, *flags]
    run = open_run(save_flags)
    train(run, 2)
    save(run, reason)
    expected = train(run, 4)
    from mindspeed_core.hosts.standalone import checkpoint

    checkpoint.poll(run, blocking=True)
    close_run(run)
    messages = Messages()
    run = open_run(["--load", directory, *flags, *resume_flags])
    start = (run.iteration, run.consumed_train_samples)
    resumed = train(run, 4)
    close_run(run)
    return expected, resumed, start, messages.said


def single_world(directory):
    root = Path(directory)
    return {
        "plain": uninterrupted_and_resumed(str(root / "plain"), []),
    }

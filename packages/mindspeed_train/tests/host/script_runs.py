"""Short trainings with the flags of other people's launch scripts; executed by the ranks of a test world."""

import itertools
import json
import os
from datetime import timedelta
from pathlib import Path

from mindspeed_core.activation import prepare
from mindspeed_core.feature import hookimpl
from mindspeed_testing.model_flags import training_flags
from mindspeed_train.loop import train

_joined = itertools.count()


def run_all(folder, runs, steps=3):
    """Train with each list of flags, one after the other; the records of ``metrics.jsonl`` by name."""
    return {name: run_one(Path(folder) / name, flags, steps) for name, flags in runs.items()}


def run_one(folder, flags, steps, plugins=()):
    join_world()
    command = [
        *training_flags([*flags, "--platform", "cpu", "--eval-iters", "0"], steps),
        "--run-dir",
        str(folder),
    ]
    with prepare(command, extra_plugins=plugins, host="standalone") as session:
        run = train(session)
    records = Path(run.run_dir) / "metrics.jsonl" if run.run_dir is not None else None
    if records is None or int(os.environ["RANK"]):
        return None
    return [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]


def join_world():
    """Start the process group on keys of its own: a store remembers what an earlier group told it."""
    import torch.distributed as dist

    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if world > 1:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(f"run{next(_joined)}", store)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )


class BrokenReplica:
    """Changes a weight of rank 1 alone, behind everybody's back."""

    @hookimpl(wrapper=True)
    def train_step(self, run):
        result = yield
        if run.dist.rank == 1:
            parameter = next(run.model[0].parameters())
            parameter.data.view(-1)[0] += 1.0
        return result


def run_with_a_broken_replica(folder, flags):
    return run_one(Path(folder), flags, 3, plugins=[BrokenReplica()])

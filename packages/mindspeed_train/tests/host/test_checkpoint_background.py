"""A background save holds the moment of its call, and a plan is used again only where it still fits."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shlex
from pathlib import Path

import pytest

from mindspeed_core.feature import hookimpl
from mindspeed_megatron.instruments.communication import count_communication
from mindspeed_testing import held_writer
from mindspeed_testing.worlds import run_world
from mindspeed_train.checkpoint.inspection import inspect

SMALL = shlex.split(
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --lr 1e-2 --train-iters 100 "
    "--eval-iters 0 --async-save"
)
SHARDED = ["--use-distributed-optimizer"]
FORMS = {
    "sharded": SHARDED,
    "bf16": [*SHARDED, "--bf16"],
    "whole": [],
    "gated": [*SHARDED, "--swiglu", "--disable-bias-linear"],
    "experts": [*SHARDED, "--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"],
    "fsdp": ["--use-torch-fsdp2", "--untie-embeddings-and-output-weights"],
}


class Growing:
    """Keeps tensors whose number, shape and dtype change from save to save."""

    def __init__(self):
        self.tensors = {}

    @hookimpl
    def checkpoint_state(self, run):
        from megatron.core.dist_checkpointing import ShardedTensor

        return {
            "growing": {
                name: ShardedTensor.from_rank_offsets(name, tensor, replica_id=run.dist.rank)
                for name, tensor in self.tensors.items()
            }
        }

    @hookimpl
    def restore_checkpoint_state(self, run, state):
        self.tensors = state["growing"]


class Choosing:
    """Leaves frozen weights out of the checkpoint."""

    def __init__(self):
        self.left_out = set()

    @hookimpl(wrapper=True)
    def model_state(self):
        state = yield
        return {
            chunk: {name: entry for name, entry in part.items() if name not in self.left_out}
            for chunk, part in state.items()
        }


_joined = itertools.count()


def open_run(flags, plugins=()):
    from datetime import timedelta

    import torch.distributed as dist

    from mindspeed_core.activation import activate
    from mindspeed_train import loop

    multiprocessing.current_process()._config["daemon"] = False
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if world > 1:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(f"run{next(_joined)}", store)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
    return loop.setup(activate([*SMALL, *flags], extra_plugins=plugins, host="standalone"))


def close_run(run):
    from mindspeed_train import loop

    loop.teardown(run.session)
    run.session.close()


def steps(run, count):
    for _ in range(count):
        run.session.call("train_step", run=run)
        run.iteration += 1


def save(run, folder, reason="interval"):
    run.args.save = str(folder)
    run.session.call("save_checkpoint", run=run, reason=reason)


def poll(run):
    from mindspeed_train.checkpoint.save import Saver

    run.session.state(Saver).poll(blocking=True)


def make_gate(folder):
    """A gate for the background writers of the runs that this rank opens from now on."""
    from mindspeed_train.checkpoint import save as module

    module.WRITER = held_writer.WORK
    return held_writer.Gate(folder / f"gate {os.environ['RANK']}")


def digests(folder):
    """The digests of everything that holds state, of the latest checkpoint."""
    (latest,) = Path(folder).glob("iter_*")
    files = json.loads((latest / "manifest.json").read_text())["files"]
    return {name: digest for name, digest in files.items() if name.endswith((".distcp", ".pt"))}


def snapshots(root):
    """Save the same moment in the foreground and, training on, in the background."""
    found, gate = {}, make_gate(root)
    for name, flags in FORMS.items():
        run = open_run(flags)
        steps(run, 2)
        save(run, root / name / "now", "exit")
        gate.hold(held_writer.MOMENTS[0])
        save(run, root / name / "beside")
        steps(run, 2)
        gate.wait_until_held()
        gate.open()
        poll(run)
        save(run, root / name / "later", "exit")
        close_run(run)
        found[name] = [digests(root / name / kind) for kind in ("now", "beside", "later")]
    return found


def plans(root):
    """Save after each change of what is saved, with the plan at hand and with a new one."""
    import torch

    from mindspeed_train.checkpoint.save import Saver

    growing, choosing = Growing(), Choosing()
    run = open_run(SHARDED, [growing, choosing])
    name = "decoder.final_layernorm.weight"
    frozen = dict(run.model[0].module.named_parameters())[name]

    def freeze():
        frozen.requires_grad_(False)
        choosing.left_out.add(name)

    moments = {
        "first": lambda: growing.tensors.update(a=torch.full((4,), 1.0)),
        "same": lambda: growing.tensors.update(a=torch.full((4,), 2.0)),
        "shape": lambda: growing.tensors.update(a=torch.full((2, 3), 3.0)),
        "dtype": lambda: growing.tensors.update(a=torch.full((2, 3), 4, dtype=torch.int32)),
        "added": lambda: growing.tensors.update(b=torch.full((5,), 5.0)),
        "removed": lambda: growing.tensors.pop("a"),
        "frozen": freeze,
    }
    found, plan = {}, None
    for moment, change in moments.items():
        change()
        save(run, root / moment / "kept")
        poll(run)
        before, plan = plan, run.session.state(Saver)._plan
        run.args.save = str(root / moment / "new")
        Saver().save(run, "exit")
        found[moment] = (plan is before, *(described(root / moment / kind) for kind in ("kept", "new")))
    frozen.requires_grad_(True)
    close_run(run)
    return found


def described(folder):
    """Return the files that hold state, and what the index says of them."""
    tensors = inspect(folder)["tensors"]
    return digests(folder), tensors


def exchanges(root):
    """Count the collectives of a call whose plan is known."""
    found = {}
    for name in ("sharded", "whole"):
        run = open_run(FORMS[name])
        for count in range(2):
            steps(run, 1)
            with count_communication() as log:
                save(run, root / f"count {name} {count}")
            poll(run)
        found[name] = [call.operation for call in log.calls]
        close_run(run)
    return found


def publications(root):
    """Hold up, fail and leave the publishing of background saves on rank 0."""
    import errno
    import threading
    from unittest import mock

    import torch.distributed as dist

    from mindspeed_core.errors import CheckpointError
    from mindspeed_train.checkpoint import publish
    from mindspeed_train.checkpoint.save import Saver

    entered, gate, usual = threading.Event(), threading.Event(), publish.publish

    def held(temporary, manifest):
        entered.set()
        gate.wait(60)
        return usual(temporary, manifest)

    def full(temporary, manifest):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save_until_published_by(action, folder):
        entered.clear(), gate.clear()
        with mock.patch.object(publish, "publish", action):
            save(run, folder)
            saver = run.session.state(Saver)
            # Every rank looks as often as the others.
            there = [False] * run.dist.world_size
            while not there[0]:
                saver.poll(blocking=action is full)
                dist.all_gather_object(there, entered.is_set())

    def names():
        dist.barrier()
        return sorted(name for name in os.listdir(folder) if name[0] != ".")

    run = open_run(SHARDED)
    steps(run, 1)
    found, folder = {}, root / "published"
    save_until_published_by(held, folder)
    steps(run, 1)
    found["held"] = names()
    dist.barrier()
    gate.set()
    poll(run)
    found["let go"] = names()
    steps(run, 1)
    try:
        save_until_published_by(full, folder)
    except CheckpointError as error:
        found["failed"] = str(error)
    found["left"] = names(), [name for name in os.listdir(folder) if name.startswith(".tmp")]
    save_until_published_by(held, folder)
    gate.set()
    close_run(run)
    return found


def world(directory):
    root = Path(directory)
    found = {"plans": plans(root), "exchanges": exchanges(root), "publications": publications(root)}
    if int(os.environ["WORLD_SIZE"]) > 1:
        found["snapshots"] = snapshots(root)
    return found


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("world")
    found = run_world(world, request.param, str(directory), timeout=300)
    # Other ranks do not wait for rank 0, which publishes, after their sessions have ended.
    found[0]["publications"]["closed"] = inspect(directory / "published")["iteration"]
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_background_save_holds_the_moment_of_its_call(ranks, form):
    now, beside, later = ranks[0]["snapshots"][form]
    assert beside == now
    assert later != now


@pytest.mark.parametrize("moment", ["first", "same", "shape", "dtype", "added", "removed", "frozen"])
def test_a_plan_is_used_again_only_where_it_still_fits(ranks, moment):
    reused, kept, new = ranks[0]["plans"][moment]
    assert kept == new
    assert reused == (moment == "same")


def test_a_frozen_weight_that_is_left_out_is_not_saved(ranks):
    names = [
        [tensor["key"] for tensor in ranks[0]["plans"][moment][1][1] if tensor["part"] == "model"]
        for moment in ("removed", "frozen")
    ]
    assert set(names[0]) - set(names[1]) == {"decoder.final_layernorm.weight"}


def test_a_save_with_a_known_plan_makes_one_exchange(ranks):
    wanted = ["all_reduce"] if len(ranks) > 1 else []
    assert [rank["exchanges"] for rank in ranks] == [{"sharded": wanted, "whole": wanted}] * len(ranks)


def test_training_goes_on_while_rank_0_publishes(ranks):
    for found in (rank["publications"] for rank in ranks):
        assert found["held"] == []
        assert found["let go"] == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def test_a_checkpoint_that_cannot_be_published_is_told_by_all_ranks_and_removed(ranks):
    for found in (rank["publications"] for rank in ranks):
        assert "no space left on the device" in found["failed"]
        assert found["left"] == (["iter_0000001", "latest_checkpointed_iteration.txt"], [])


def test_the_end_of_a_session_lets_a_checkpoint_be_published(ranks):
    assert ranks[0]["publications"]["closed"] == 3

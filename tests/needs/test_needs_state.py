"""Needs of state: optimizers, checkpoints, other sources of weights."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from toy_training import PP2, TP2, distance, losses, parameters, training

from mindspeed_core.errors import CheckpointError
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.model_state import count_as_loaded
from mindspeed_testing import WorldError, run_world

DP2: tuple[str, ...] = ()


def save(run):
    return run.session.call("save_checkpoint", run=run, reason="end")


def lion(folder, *layout):
    flags = ("--optimizer", "toy-lion", "--lr", "1e-3", *layout)
    with training(*TP2, *layout) as run:
        initial = parameters(run)
        adam = losses(run)
    with training(*TP2, *flags, "--save", folder, initial=initial) as run:
        first = losses(run)
        save(run)
        kept = {name for state in run.optimizer.optimizer.state.values() for name in state}
        expected = losses(run, 3)
        end = parameters(run)
    with training(*PP2, *flags, "--load", folder) as run:
        resumed = losses(run, 3)
        return adam, first, kept, expected, resumed, distance(end, parameters(run))


@pytest.mark.parametrize("layout", [(), ("--use-distributed-optimizer",)], ids=["whole", "sharded"])
def test_another_inner_optimizer_trains_and_resumes_under_another_layout(tmp_path, layout):
    for adam, first, kept, expected, resumed, difference in run_world(lion, 2, str(tmp_path), *layout):
        assert first[1] < first[0]
        assert first[1] != adam[1]
        assert kept == {"exp_avg"}
        assert resumed == pytest.approx(expected, rel=1e-5)
        # The sign of a gradient near zero may fall either way: one update of 1e-3 each at most.
        assert difference < 1e-2


def averages(run):
    """The unsharded average by key, put together from what the feature contributes to a checkpoint."""
    (state,) = run.session.collect("checkpoint_state", run=run)
    entries = state["acme-average"].values()
    mine = [(entry.key, entry.global_shape, entry.global_slice(), entry.data) for entry in entries]
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    whole = {}
    for key, shape, where, data in itertools.chain(*parts):
        whole.setdefault(key, torch.zeros(shape))[where] = data
    return whole


def average(folder, before, after):
    with training(*before, "--acme-average", "0.5", "--save", folder) as run:
        losses(run, 3)
        save(run)
        expected, weights = averages(run), parameters(run)
    with training(*after, "--acme-average", "0.5", "--load", folder) as run:
        found = averages(run)
        same = found.keys() == expected.keys() and all(
            torch.equal(found[key], expected[key]) for key in found
        )
        key = "decoder.final_layernorm.weight"
        apart = float((found[key] - weights.tensors[key]).abs().max())
        return len(found), same, apart, losses(run, 1)


@pytest.mark.parametrize(("before", "after"), [(DP2, TP2), (TP2, PP2)], ids=["dp2-tp2", "tp2-pp2"])
def test_a_features_state_is_loaded_by_another_layout(tmp_path, before, after):
    for count, same, apart, loss in run_world(average, 2, str(tmp_path), before, after):
        assert count > 10
        assert same
        assert apart > 0.0
        assert loss[0] > 0


def weights_file(path):
    with training() as run:
        initial = parameters(run)
        expected = losses(run)
    if dist.get_rank() == 0:
        np.savez(path, **{key: tensor.numpy() for key, tensor in initial.tensors.items()})
    dist.barrier()
    loaded = {}
    for name, layout in (("tp2", TP2), ("pp2", PP2)):
        with training(*layout, "--seed", "99", "--toy-weights-file", path) as run:
            loaded[name] = distance(initial, parameters(run))
    return loaded, expected


def test_weights_come_from_a_plain_file_into_any_layout(tmp_path):
    for loaded, _ in run_world(weights_file, 2, str(tmp_path / "weights.npz")):
        assert loaded == {"tp2": 0.0, "pp2": 0.0}


def missing_weights(path):
    with training("--toy-weights-file", path):
        pass


def test_an_unreadable_weights_file_is_named(tmp_path):
    with pytest.raises(WorldError, match=r"--toy-weights-file .*absent\.npz: cannot be read"):
        run_world(missing_weights, 1, str(tmp_path / "absent.npz"))


def export(folder):
    with training(*PP2, "--toy-export-weights", "--save", folder) as run:
        losses(run, 1)
        info = save(run)
        dist.barrier()
        weights = parameters(run)
    with np.load(f"{folder}/final_norm.npz") as archive:
        exported = torch.from_numpy(archive["decoder.final_layernorm.weight"])
    same = torch.equal(exported, weights.tensors["decoder.final_layernorm.weight"])
    from torch.distributed.checkpoint import FileSystemReader

    keys = FileSystemReader(str(info.path)).read_metadata().state_dict_metadata
    common = torch.load(info.path / "common.pt", weights_only=True)
    return same, sorted(key for key in keys if key.startswith("optimizer")), common["content_metadata"]


def test_a_feature_writes_beside_the_checkpoint_and_leaves_state_out_of_it(tmp_path):
    for same, optimizer, described in run_world(export, 2, str(tmp_path)):
        assert same
        assert optimizer == []
        # What megatron-core's readers need to know about the layout of the file.
        assert described["singleton_local_shards"] is False


def adapter(folder):
    """A base and an adapter on top of it, both saved at tp2."""
    with training(*TP2, "--save", f"{folder}/base") as run:
        losses(run)
        save(run)
    base = ("--toy-adapter", "2", "--toy-adapter-base", f"{folder}/base")
    with training(*TP2, *base, "--save", f"{folder}/adapter") as run:
        first = losses(run)
        save(run)
        return first + losses(run), parameters(run).tensors


def adapter_elsewhere(folder):
    """The same adapter on one rank, and what is refused."""
    base = ("--toy-adapter", "2", "--toy-adapter-base", f"{folder}/base")
    with training(*base, "--use-distributed-optimizer") as run:
        fresh = losses(run)
    with training(*base, "--load", f"{folder}/adapter") as run:
        found = losses(run), parameters(run).tensors
    refused = []
    for flags, probes in (
        (("--toy-adapter", "2", "--load", f"{folder}/adapter"), ()),
        (("--toy-adapter", "2", "--toy-adapter-base", f"{folder}/none"), ()),
        ((*base, "--save", f"{folder}/less"), (WithoutUp(),)),
    ):
        try:
            with training(*flags, probes=probes):
                pass
        except CheckpointError as error:
            refused.append(str(error))
    with training("--toy-adapter", "2", "--load", f"{folder}/adapter", probes=[Counted()]) as run:
        declared = run.iteration
    return fresh, found, refused, declared, kept(f"{folder}/adapter")


def kept(folder):
    from torch.distributed.checkpoint import FileSystemReader

    index = FileSystemReader(f"{folder}/iter_0000002").read_metadata().state_dict_metadata
    names = (key for key in map(str, index) if not key.startswith(("optimizer", "rng_state")))
    return sorted({key.rpartition(".")[2] for key in names})


class WithoutUp:
    """Leaves trained weights out of a checkpoint."""

    @hookimpl(wrapper=True)
    def model_state(self, source):
        state = yield
        return {
            key: {name: entry for name, entry in part.items() if "adapter_up" not in name}
            for key, part in state.items()
        }


class Counted:
    """Says that the base has its values."""

    @hookimpl(wrapper=True)
    def load_checkpoint(self, run):
        count_as_loaded(run, lambda name: "adapter" not in name)
        return (yield)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("adapters"))
    return run_world(adapter, 2, folder), run_world(adapter_elsewhere, 1, folder)[0]


def test_an_adapter_is_saved_alone_and_loaded_with_its_base_in_another_layout(adapters):
    trained, (fresh, found, _, _, names) = adapters
    for steps, weights in trained:
        assert fresh == pytest.approx(steps[:2], rel=1e-5)
        assert found[0] == pytest.approx(steps[2:], rel=1e-5)
        assert max(float((weights[key] - found[1][key]).abs().max()) for key in weights) < 1e-5
    assert names == ["adapter_down", "adapter_up"]


def test_weights_that_come_from_nowhere_are_named(adapters):
    _, (_, _, refused, declared, _) = adapters
    assert "toy-adapter leaves them out, and from nowhere else, first 'decoder.final" in refused[0]
    assert "none: holds no checkpoint" in refused[1]
    assert declared == 2


def test_trained_weights_cannot_be_left_out_of_a_checkpoint(adapters):
    _, (_, _, refused, _, _) = adapters
    assert "leaves 4 weights out of the checkpoint that are trained, first 'decoder.layers.0" in refused[2]

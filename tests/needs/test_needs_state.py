"""Needs of state: optimizers, checkpoints, other sources of weights."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from toy_training import PP2, TP2, distance, losses, parameters, training

from mindspeed_core.testing import WorldError, run_world

DP2: tuple[str, ...] = ()


def save(run):
    return run.session.call("save_checkpoint", run=run, reason="end")


def momentum(run):
    (part,) = run.optimizer.chained_optimizers
    return [state["momentum"] for state in part.optimizer.state.values()]


def lion(folder):
    with training(*TP2) as run:
        initial = parameters(run)
        adam = losses(run)
    with training(*TP2, "--toy-lion", "--lr", "1e-3", "--save", folder, initial=initial) as run:
        first = losses(run)
        shapes = {tensor.dim() for tensor in momentum(run)}
        save(run)
        flat_again = {tensor.dim() for tensor in momentum(run)}
        expected = losses(run, 3)
        end = parameters(run)
    with training(*PP2, "--toy-lion", "--lr", "1e-3", "--load", folder) as run:
        resumed = losses(run, 3)
        return adam, first, shapes, flat_again, expected, resumed, distance(end, parameters(run))


def test_another_inner_optimizer_trains_and_resumes_under_another_layout(tmp_path):
    for adam, first, shapes, flat_again, expected, resumed, difference in run_world(lion, 2, str(tmp_path)):
        assert first[1] < first[0]
        assert first[1] != adam[1]
        assert shapes == flat_again == {1}
        assert resumed == pytest.approx(expected, rel=1e-5)
        # The sign of a gradient near zero may fall either way: one update of 1e-3 each at most.
        assert difference < 1e-2


def averages(run):
    """The unsharded average by key, put together from what the feature contributes to a checkpoint."""
    (state,) = run.session.collect("checkpoint_state", run=run)
    entries = state["toy-average"].values()
    mine = [(entry.key, entry.global_shape, entry.global_slice(), entry.data) for entry in entries]
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    whole = {}
    for key, shape, where, data in itertools.chain(*parts):
        whole.setdefault(key, torch.zeros(shape))[where] = data
    return whole


def average(folder, before, after):
    with training(*before, "--toy-average", "0.5", "--save", folder) as run:
        losses(run, 3)
        save(run)
        expected, weights = averages(run), parameters(run)
    with training(*after, "--toy-average", "0.5", "--load", folder) as run:
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

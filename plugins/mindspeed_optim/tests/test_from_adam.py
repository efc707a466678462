"""Muon goes on from a checkpoint of Adam, in another layout: with its parameters and its first moment."""

import pytest
import torch

from mindspeed_optim.features.proofs import PLAIN, SHARDED, TP2
from mindspeed_testing.training import Checkpoint, train_side

MUON = ("--optimizer", "muon", "--muon-tp-mode", "duplicated")


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("adam"))
    options = {"gradients": False, "optimizer_state": True}
    adam = train_side((*PLAIN, *SHARDED), 2, 0, checkpoint=Checkpoint(folder, 2), **options)
    loaded = Checkpoint(folder, 2, load=True)
    muon = train_side((*PLAIN, *MUON, *TP2, *SHARDED), 2, 0, checkpoint=loaded, **options)
    return adam, muon


def test_parameters_and_first_moments_are_adams(sides):
    adam, muon = sides
    for key, tensor in adam.parameters.tensors.items():
        assert torch.equal(muon.parameters.tensors[key], tensor)
    kept = {key: tensor for key, tensor in adam.saved.optimizer.tensors.items() if "exp_avg_sq" not in key}
    assert kept
    for key, tensor in kept.items():
        assert torch.equal(muon.saved.optimizer.tensors[key], tensor)


def test_second_moments_stay_where_adam_makes_the_update(sides):
    adam, muon = sides
    seconds = {
        key: (tensor, muon.saved.optimizer.tensors[key])
        for key, tensor in adam.saved.optimizer.tensors.items()
        if "exp_avg_sq" in key
    }
    matrices = {key for key, (_, loaded) in seconds.items() if not loaded.any()}
    assert matrices
    assert all(
        tensor.dim() >= 2 and "embedding" not in key
        for key, (tensor, _) in seconds.items()
        if key in matrices
    )
    for key, (tensor, loaded) in seconds.items():
        assert key in matrices or torch.equal(tensor, loaded)

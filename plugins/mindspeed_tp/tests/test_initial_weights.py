"""A seeded initialisation on CPU draws the weights of one process, however they are cut."""

import pytest
import torch

from mindspeed_testing.training import train_side
from mindspeed_tp.features.grid_proofs import grid
from mindspeed_tp.features.proofs import MODEL, SP

LAYOUTS = {
    "grid": (4, grid(2, 2)),
    "uneven": (3, ("--tensor-model-parallel-size", "3", *SP, "--unaligned-linear")),
}
BASE = (*MODEL, "--num-layers", "1", "--vocab-size", "144", "--make-vocab-size-divisible-by", "12")


@pytest.fixture(scope="module")
def alone():
    return train_side(BASE, 1, 1, gradients=False, platform="cpu").initial.tensors


@pytest.mark.parametrize("layout", ["grid", pytest.param("uneven", marks=pytest.mark.thorough)])
def test_a_layout_begins_with_the_weights_of_one_process(alone, layout):
    ranks, flags = LAYOUTS[layout]
    found = train_side((*BASE, *flags), ranks, 1, gradients=False, platform="cpu").initial.tensors
    assert found.keys() == alone.keys()
    assert [name for name in alone if not torch.equal(found[name], alone[name])] == []

"""Checkpoints go from every layout to others, moments of Adam included, and to runs without this package."""

import pytest

from mindspeed_testing.compare_sides import compare_sides
from mindspeed_testing.training import Checkpoint, train_side
from mindspeed_tp.features.grid_proofs import grid
from mindspeed_tp.features.proofs import BOTH_OVERLAPS, MODEL, SHARDED, SP, TP2

# Every layout pads the vocabulary to the same size.
BASE = (*MODEL, "--vocab-size", "144", "--make-vocab-size-divisible-by", "12")
LAYOUTS = {
    "1d": (2, (*TP2, *SP, *SHARDED)),
    "2x2": (4, (*grid(2, 2), *BOTH_OVERLAPS)),
    "1x2-dp2": (4, (*grid(1, 2), *BOTH_OVERLAPS)),
    "uneven-3": (3, ("--tensor-model-parallel-size", "3", *SP, "--unaligned-linear", *SHARDED)),
    "one": (1, SHARDED),
}
ROUTES = [
    *(("1d", "2x2"), ("2x2", "1x2-dp2"), ("1x2-dp2", "uneven-3"), ("uneven-3", "2x2"), ("uneven-3", "1d")),
    *(("2x2", "1d"), ("1d", "uneven-3"), ("2x2", "one"), ("uneven-3", "one"), ("one", "uneven-3")),
]
SAVED_AFTER, STEPS = 2, 2
COMPARED = ("losses", "parameters", "optimizer state")
OTHERS = ("mindspeed_profile.features:Profile",)
"""Declarations of another package in place of the installed ones."""


def trained(layout, folder, load, **facts):
    ranks, flags = LAYOUTS[layout]
    return train_side(
        (*BASE, *flags),
        ranks,
        STEPS,
        gradients=False,
        optimizer_state=True,
        platform="cpu",
        checkpoint=Checkpoint(str(folder), SAVED_AFTER, load),
        **facts,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints by layout, and what each training did after it."""
    made = {}

    def of(layout):
        if layout not in made:
            folder = tmp_path_factory.mktemp(layout)
            made[layout] = folder, trained(layout, folder, load=False)
        return made[layout]

    return of


@pytest.mark.thorough
@pytest.mark.parametrize(("source", "target"), ROUTES)
def test_a_checkpoint_continues_in_another_layout(saved, source, target):
    folder, expected = saved(source)
    facts = {"declarations": OTHERS} if target == "one" else {}
    found = trained(target, folder, load=True, **facts)
    assert not (target == "one" and {"tp-linear", "tp-2d", "unaligned-linear"} & set(found.features))
    compared, counts = compare_sides(found, expected, tolerance=1e-5, quantities=COMPARED, demanded=COMPARED)
    assert compared.equal, str(compared)
    assert counts["optimizer state"] > counts["parameters"]

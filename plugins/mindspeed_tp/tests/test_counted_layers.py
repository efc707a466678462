"""Layers communicate what the closed forms say: recomputation, grids, uneven parts."""

import sys
from pathlib import Path

import pytest

from mindspeed_testing import run_world
from mindspeed_tp.features.grid_proofs import grid
from mindspeed_tp.features.proofs import COC

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from tp_exact import (
    FULL,
    LEVEL,
    MODEL,
    ONE_CALL,
    RECOMPUTED,
    SP,
    TP2,
    counted,
    grid_layer,
    recomputed,
    uneven_layer,
)

OFTEN = ("none", "plain", "level 2")


@pytest.fixture(scope="module")
def recomputing():
    return run_world(recomputed, 2, OFTEN)


@pytest.fixture(scope="module")
def recomputing_otherwise():
    return run_world(recomputed, 2, tuple(kind for kind in RECOMPUTED if kind not in OFTEN))


@pytest.mark.parametrize(("kind", "count"), [("none", 4), ("plain", 6), ("level 2", 4)])
def test_sums_of_a_recomputed_layer(recomputing, kind, count):
    for rank in recomputing:
        assert rank["sums", kind][0] == {"all_reduce": count}


@pytest.mark.parametrize(
    ("kind", "gathers", "scatters"), [("none", 6, 4), ("plain", 8, 6), ("level 2", 6, 4)]
)
def test_gathers_and_scatters_of_a_recomputed_layer(recomputing, kind, gathers, scatters):
    for rank in recomputing:
        expected = {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": scatters}
        assert rank["rows", kind][0] == expected


@pytest.mark.thorough
def test_other_levels_of_a_recomputed_layer(recomputing_otherwise):
    for rank in recomputing_otherwise:
        sums = {kind: rank["sums", kind][0]["all_reduce"] for kind in ("level 1", "level 2 again")}
        assert sums == {"level 1": 5, "level 2 again": 4}
        for kind, gathers, scatters in (("level 1 again", 8, 5), ("level 2 again", 8, 4)):
            expected = {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": scatters}
            assert rank["rows", kind][0] == expected
        _states_its_bytes(rank)


def test_level_two_sends_the_bytes_of_a_step_without_recomputation(recomputing):
    for rank in recomputing:
        for layout in ("sums", "rows"):
            assert rank[layout, "level 2"][1] == rank[layout, "none"][1]
            assert rank[layout, "level 2"][2:4] == pytest.approx(rank[layout, "none"][2:4], rel=1e-6)


def test_a_layer_receives_what_the_features_formula_states(recomputing):
    for rank in recomputing:
        _states_its_bytes(rank)


def _states_its_bytes(rank):
    for *_, found, stated in rank.values():
        assert stated is None or found == pytest.approx(stated, rel=1e-9)


@pytest.mark.parametrize(
    ("x", "y"),
    [(2, 2), *(pytest.param(*grid, marks=pytest.mark.thorough) for grid in ((1, 2), (2, 1), (4, 1)))],
)
def test_a_layer_of_a_grid_receives_what_the_closed_form_says(x, y):
    for found, expected, stated in run_world(grid_layer, x * y, x, y):
        assert found == pytest.approx(expected, rel=1e-9)
        assert found == pytest.approx(stated, rel=1e-9)


def orders():
    plain = (*MODEL, *ONE_CALL, "--num-layers", "2")
    flags = (*plain, *FULL, LEVEL, "2")
    return {
        "rows": counted((*flags, *TP2, *SP, *COC, "4")).order,
        "grid": counted((*flags, *grid(1, 2), *COC, "2")).order,
        "uneven": counted((*plain, *TP2, *SP, "--unaligned-linear", "--seq-length", "15")).order,
    }


def test_ranks_issue_their_collectives_in_one_order():
    one, two = run_world(orders, 2)
    for name in one:
        # Uneven parts are padded: bytes are the same, too.
        gathered = [call for call in one[name] if call[0] != "all_gather_object"]
        assert gathered == [call for call in two[name] if call[0] != "all_gather_object"]


def test_uneven_parts_cost_padding_and_no_further_call():
    for rank in run_world(uneven_layer, 2):
        (even, full, stated), (odd, padded, stated_padded) = rank[16], rank[15]
        assert (full, padded) == (stated, stated_padded)
        assert odd == even
        # 15 positions travel as 16: the factor t * ceil(s / t) / s of 15 / 16 of the bytes.
        assert padded == full

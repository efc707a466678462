"""What layers communicate is what the closed forms say: recomputation, grids, uneven parts."""

import pytest
from counted_steps import counted

from mindspeed_core.testing import run_world
from mindspeed_tp.features.grid_proofs import grid
from mindspeed_tp.features.proofs import COC, FULL, MODEL, SP, TP2

ONE_CALL = ("--global-batch-size", "1", "--micro-batch-size", "1")
LEVEL = "--optimize-recomp-communication-level"
AGAIN = "--no-recompute-comm-save-gathered"
RECOMPUTED = {
    "none": (),
    "plain": FULL,
    "level 1": (*FULL, LEVEL, "1"),
    "level 2": (*FULL, LEVEL, "2"),
    "level 1 again": (*FULL, LEVEL, "1", AGAIN),
    "level 2 again": (*FULL, LEVEL, "2", AGAIN),
}


def of_layers(flags):
    """Return the calls of one layer: a step of two layers less one of a single layer."""
    one = counted((*MODEL, *ONE_CALL, *flags, "--num-layers", "1"))
    two = counted((*MODEL, *ONE_CALL, *flags, "--num-layers", "2"))
    return two.calls - one.calls, one, two


def recomputed():
    found = {}
    for layout, flags in {"sums": TP2, "rows": (*TP2, *SP)}.items():
        for kind, further in RECOMPUTED.items():
            calls, _, two = of_layers((*flags, *further))
            found[layout, kind] = dict(calls), sum(two.received.values()), two.loss, two.grad_norm
    return found


@pytest.fixture(scope="module")
def recomputing():
    return run_world(recomputed, 2)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("none", 4), ("plain", 6), ("level 1", 5), ("level 2", 4), ("level 2 again", 4)],
)
def test_sums_of_a_recomputed_layer(recomputing, kind, count):
    for rank in recomputing:
        assert rank["sums", kind][0] == {"all_reduce": count}


@pytest.mark.parametrize(
    ("kind", "gathers", "scatters"),
    [
        ("none", 6, 4),
        ("plain", 8, 6),
        ("level 1 again", 8, 5),
        ("level 2 again", 8, 4),
        ("level 2", 6, 4),
    ],
)
def test_gathers_and_scatters_of_a_recomputed_layer(recomputing, kind, gathers, scatters):
    for rank in recomputing:
        expected = {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": scatters}
        assert rank["rows", kind][0] == expected


def test_level_two_sends_the_bytes_of_a_step_without_recomputation(recomputing):
    for rank in recomputing:
        for layout in ("sums", "rows"):
            assert rank[layout, "level 2"][1] == rank[layout, "none"][1]
            assert rank[layout, "level 2"][2:] == pytest.approx(rank[layout, "none"][2:], rel=1e-6)


def on_a_grid(x, y, flags):
    _, one, two = of_layers((*grid(x, y), *flags))
    groups = set(one.received) | set(two.received)
    return {name: two.received.get(name, 0) - one.received.get(name, 0) for name in groups}, two.order


@pytest.mark.parametrize(
    ("x", "y"),
    [(2, 2), *(pytest.param(*grid, marks=pytest.mark.thorough) for grid in ((1, 2), (2, 1), (4, 1)))],
)
def test_a_layer_of_a_grid_receives_what_the_closed_form_says(x, y):
    from mindspeed_tp.volume import LayerShape, input_gathers, linears, norms

    shape = LayerShape(tokens=16, hidden=64, feed_forward=128, gated=True, query=64, key_value=64)
    # Backward mirrors forward, and gathers the inputs of linears once more.
    elements = 2 * linears(shape, x, y) + input_gathers(shape, x, y) + 2 * norms(shape, x, y)
    ranks = run_world(on_a_grid, x * y, x, y, ("--ffn-hidden-size", "128", "--seq-length", "16"))
    for received, _ in ranks:
        # Summed over x are two norms' weights.
        summed = 2 * (x - 1) / x * 2 * 64 / y * 4
        found = received.get("tp2d.x", 0) + received.get("tp2d.y", 0) - summed
        assert found == pytest.approx(4 * elements, rel=1e-9)


def orders():
    flags = (*MODEL, *ONE_CALL, *FULL, LEVEL, "2")
    return {
        "rows": counted((*flags, *TP2, *SP, *COC, "4")).order,
        "grid": counted((*flags, *grid(1, 2), *COC, "2")).order,
        "uneven": counted((*MODEL, *ONE_CALL, *TP2, *SP, "--unaligned-linear", "--seq-length", "15")).order,
    }


def test_ranks_issue_their_collectives_in_one_order():
    one, two = run_world(orders, 2)
    for name in one:
        # Uneven parts are padded: bytes are the same, too.
        gathered = [call for call in one[name] if call[0] != "all_gather_object"]
        assert gathered == [call for call in two[name] if call[0] != "all_gather_object"]


def uneven():
    found = {}
    for positions in (16, 15):
        flags = (*TP2, *SP, "--unaligned-linear", "--seq-length", str(positions))
        calls, one, two = of_layers(flags)
        found[positions] = dict(calls), sum(two.received.values()) - sum(one.received.values())
    return found


def test_uneven_parts_cost_padding_and_no_further_call():
    for rank in run_world(uneven, 2):
        (even, full), (odd, padded) = rank[16], rank[15]
        assert odd == even
        # 15 positions travel as 16: the factor t * ceil(s / t) / s of 15 / 16 of the bytes.
        assert padded == full

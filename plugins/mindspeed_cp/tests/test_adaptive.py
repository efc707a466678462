"""Balanced and regrouped layouts of given masks: exact, and fewer bytes, over every way to exchange."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mindspeed_cp.engine import masks, planners, tiles
from mindspeed_cp.engine.attention import CallOptions, Members, split_attention
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import GATHER, Grid, balanced_layout, layout_of
from mindspeed_cp.options import CPOptions
from mindspeed_megatron.instruments.communication import count_communication
from mindspeed_testing import run_world

LENGTH, TILE = 96, 8


def scattered(seed):
    """About a third of all scores, in tiles of which many are empty; every query sees itself."""
    random = np.random.default_rng(seed)
    count = LENGTH // TILE
    coarse = np.kron(random.random((count, count)) < 0.5, np.ones((TILE, TILE))) > 0
    seen = coarse & (random.random((LENGTH, LENGTH)) < 0.7)
    np.fill_diagonal(seen, True)
    return MaskRule(LENGTH, causal=False, matrix=seen)


def alternating(documents):
    """Documents whose strips alternate."""
    document = np.arange(LENGTH) // TILE % documents
    return MaskRule(LENGTH, causal=False, matrix=np.tril(document[:, None] == document[None, :]))


RULES = {
    "scattered": (scattered(1),),
    "two samples": (scattered(2), scattered(3)),
    "alternating": (alternating(4),),
    "causal besides": (MaskRule(LENGTH, matrix=scattered(4).matrix),),
    "window besides": (MaskRule(LENGTH, window=20, matrix=scattered(5).matrix | True),),
    "long window": (MaskRule(LENGTH, window=40),),
}
GRIDS = {
    "fetched": Grid(4, method=GATHER, layout="balanced"),
    "regrouped": Grid(4, method=GATHER, layout="balanced", regroup=True),
    "scores": Grid(4, method=GATHER, layout="balanced", tile=1),
    "hybrid": Grid(2, 2, GATHER, layout="balanced", regroup=True),
    "ring": Grid(4, layout="contiguous"),
    "balanced ring": Grid(4, layout="balanced", regroup=True),
    "heads": Grid(1, 4),
}


def small_tiles():
    """Sequences of a few dozen tokens have many tiles."""
    for module in (tiles, masks, planners):
        module.TILE = TILE
    masks.BAND_ROWS = TILE


def members_of(grid):
    found = {}
    for name, lists in (("inner", grid.inner_ranks()), ("outer", grid.outer_ranks())):
        for ranks in lists:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks and len(ranks) > 1:
                found[name] = group
    return Members(dist.get_rank(), **found)


def errors(grid, members, rules):
    """Relative errors of the output and the gradients against a score matrix, and the bytes sent."""
    torch.manual_seed(0)
    whole = [torch.randn(2, heads, LENGTH, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    outer = torch.randn(2, 4, LENGTH, 8, dtype=torch.float64)
    expected = [tensor.clone().requires_grad_() for tensor in whole]
    query, key, value = expected[0], *(tensor.repeat_interleave(2, 1) for tensor in expected[1:])
    everything = np.arange(LENGTH)
    seen = torch.stack([torch.from_numpy(rule.visible(everything, everything)) for rule in rules])
    scores = (query @ key.transpose(-1, -2) * 8**-0.5).masked_fill(~seen[:, None], float("-inf"))
    output = torch.softmax(scores, -1) @ value
    output.backward(outer)
    position = torch.from_numpy(layout_of(grid, rules).positions(members.rank))
    mine = [tensor[:, :, position].requires_grad_() for tensor in whole]
    with count_communication() as log:
        found = split_attention(*mine, rules, members, CPOptions(grid), CallOptions(8**-0.5))
        found.backward(outer[:, :, position])
    pairs = zip((found, *(t.grad for t in mine)), (output, *(t.grad for t in expected)), strict=True)
    return [float((got - want[:, :, position]).norm() / want.norm()) for got, want in pairs], log.sent_bytes()


def every_mask():
    small_tiles()
    dist.init_process_group("gloo")
    found = {}
    for name, grid in GRIDS.items():
        members = members_of(grid)
        for mask, rules in RULES.items():
            found[name, mask] = errors(grid, members, rules)
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.thorough
def test_every_mask_is_exact_on_every_grid_and_tiles_that_see_the_same_travel_less():
    ranks = run_world(every_mask, 4)
    for found in ranks:
        for case, (wrong, _) in found.items():
            assert max(wrong) < 1e-9, case
    apart, together = (
        sum(found[name, "alternating"][1] for found in ranks) for name in ("fetched", "regrouped")
    )
    assert together == 0
    assert apart > 0


def test_a_changed_mask_changes_the_plan_and_an_equal_one_does_not():
    grid, lower = GRIDS["fetched"], np.tril(np.ones((1024, 1024), dtype=bool))
    busy = lower | (np.arange(1024) < 512)[:, None]
    first, same, other = (MaskRule(1024, False, matrix=seen) for seen in (lower, lower.copy(), busy))
    assert layout_of(grid, (first,)) is layout_of(grid, (same,))
    assert layout_of(grid, (first,)) != layout_of(grid, (other,))


@pytest.mark.parametrize("length", [97, 1000, 4100])
def test_masks_of_any_length_are_split(length):
    matrix = np.tril(np.ones((length, length), dtype=bool))
    layout = balanced_layout([MaskRule(length, causal=False, matrix=matrix)], 4)
    assert layout.length == length
    assert max(layout.lengths) - min(layout.lengths) <= 16

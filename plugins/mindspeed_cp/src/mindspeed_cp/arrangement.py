"""How flags arrange the ranks of context parallelism, and which groups they form; no torch."""

from __future__ import annotations

from mindspeed_cp.engine.planners import GATHER, RING, Grid
from mindspeed_cp.engine.tiles import TILE
from mindspeed_cp.options import ADAPTIVE_ALGO, GATHER_ALGO, HYBRID_ADAPTIVE_ALGO, CPOptions

INNER, OUTER, ACROSS, SECOND = "cp.inner", "cp.outer", "cp.across", "cp.second"


def grid_of(options: CPOptions) -> Grid:
    """How the ranks are arranged."""
    if options.planned is not None:
        return options.planned
    gathers = options.algorithm in (GATHER_ALGO, ADAPTIVE_ALGO, HYBRID_ADAPTIVE_ALGO)
    layout = options.layout
    if layout == "auto" and options.algorithm in (ADAPTIVE_ALGO, HYBRID_ADAPTIVE_ALGO):
        layout = "balanced"
    if layout == "auto" and not options.causal:
        layout = "contiguous"
    return Grid(
        options.outer,
        options.inner,
        GATHER if gathers else RING,
        options.window,
        layout,
        options.chunks,
        options.regroup,
        1 if options.count_scores else TILE,
    )


def group_parts(options: CPOptions) -> dict[str, list[list[int]]]:
    """The groups that every context-parallel group is split into, as places within it, in order of creation.

    Args:
        options: what flags say.
    """
    grid = grid_of(options)
    parts: dict[str, list[list[int]]] = {}
    if grid.inner > 1 and grid.outer > 1:
        parts[INNER] = grid.inner_ranks()
        parts[OUTER] = grid.outer_ranks()
    if grid.window > 1:
        parts[ACROSS] = grid.outer_ranks()
    # With an odd number of ranks two neighbours would send on the same one.
    if options.send_receive_overlap and grid.method == RING and grid.outer > 1 and grid.outer % 2 == 0:
        parts[SECOND] = grid.outer_ranks()
    return parts

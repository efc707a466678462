"""Placement of planned linears in a specification tree, once for all features of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec

from mindspeed_core.errors import SessionError
from mindspeed_megatron.layer_sites import Site
from mindspeed_megatron.layer_spec import SpecEditor
from mindspeed_tp.linears import PlannedColumn, PlannedRow
from mindspeed_tp.options import LINEARS, RECOMPUTE
from mindspeed_tp.plan import LinearPlans
from mindspeed_tp.segments import SegmentOptions, segmented

if TYPE_CHECKING:
    from mindspeed_core.session import Session
    from mindspeed_tp.uneven.cut import Cuts

COLUMNS, ROWS = ("qkv", "fc1"), ("proj", "fc2")
"""Roles of the linears of a layer, also of shared experts."""


def place_linears(
    session: Session,
    spec: Any,
    plans: LinearPlans,
    flags: str,
    *,
    grid: bool = False,
    cuts: Cuts | None = None,
) -> Any:
    """Return the tree with planned linears in place of megatron-core's; those of routed experts stay.

    Args:
        session: counts what is placed.
        spec: the tree.
        plans: of the linears.
        flags: what asked for them, for messages.
        grid: their weights are cut in two dimensions.
        cuts: how their weights are cut unevenly; None where they are cut evenly.

    Raises:
        SessionError: another module than megatron-core's linear stands at one of the sites.
    """
    editor = SpecEditor(spec, owner=LINEARS, session=session)
    columns: type = PlannedColumn
    rows: type = PlannedRow
    if grid:
        from mindspeed_tp.grid.linears import Column2D, Row2D

        columns, rows = Column2D, Row2D
    elif cuts is not None:
        from mindspeed_tp.uneven.linears import UnevenColumn, UnevenRow

        columns, rows = UnevenColumn, UnevenRow

    def planned(site: Site) -> ModuleSpec | None:
        if "experts" in site.within:
            return None
        module: Any = site.spec.module if site.spec is not None else None
        column = site.role in COLUMNS
        theirs = ColumnParallelLinear if column else RowParallelLinear
        ours, plan = (columns, plans.column) if column else (rows, plans.row)
        if module is not theirs:
            name = getattr(module, "__qualname__", module)
            if site.placed_by:
                raise SessionError(
                    f"{site.path} is {name} of {site.placed_by}, where {flags} plans {theirs.__qualname__}; "
                    f"drop one of the two, or let {site.placed_by} contain the linear (Site.wrap)"
                )
            raise SessionError(
                f"{site.path} is {name}, where {flags} plans {theirs.__qualname__}; use "
                "--transformer-impl local, or drop the flag"
            )
        params: dict[str, Any] = {} if cuts is None else {"cut": cuts.of_role(site.role)}
        return site.carry(ours, plan=plan, **params)

    editor.replace((*COLUMNS, *ROWS), planned)
    return editor.spec


def place_segments(session: Session, spec: Any, segments: SegmentOptions, first_layers: int | None) -> Any:
    """Return the tree with layers that are recomputed in segments.

    Args:
        session: counts what is placed.
        spec: the tree of a chunk.
        segments: how each layer is recomputed.
        first_layers: how many of the chunk's layers; None for all.
    """
    editor = SpecEditor(spec, owner=RECOMPUTE, session=session)

    def layer(site: Site) -> ModuleSpec | None:
        if site.spec is None or site.within:
            return None
        number = int(site.path.rpartition(".")[2])
        if first_layers is not None and number >= first_layers:
            return None
        return site.carry(segmented(site.spec.module), segments=segments)

    editor.replace("layer", layer, wrap=True)
    return editor.spec

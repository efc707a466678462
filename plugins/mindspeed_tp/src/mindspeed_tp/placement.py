"""Placement of planned linears in a specification tree, once for all features of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec

from mindspeed_core.errors import SessionError
from mindspeed_core.layer_spec import Site, SpecEditor
from mindspeed_tp.linears import PlannedColumn, PlannedRow
from mindspeed_tp.options import LINEARS, RECOMPUTE
from mindspeed_tp.plan import LinearPlan
from mindspeed_tp.segments import SegmentOptions, segmented

if TYPE_CHECKING:
    from mindspeed_core.session import Session

COLUMNS, ROWS = ("qkv", "fc1"), ("proj", "fc2")
"""Roles of the linears of a layer, also of shared experts."""


def place_linears(session: Session, spec: Any, plan: LinearPlan, flags: str) -> Any:
    """Return the tree with planned linears in place of megatron-core's; those of routed experts stay.

    Args:
        session: counts what is placed.
        spec: the tree.
        plan: of every linear.
        flags: what asked for them, for messages.

    Raises:
        SessionError: another module than megatron-core's linear stands at one of the sites.
    """
    editor = SpecEditor(spec, owner=LINEARS, session=session)

    def planned(site: Site) -> ModuleSpec | None:
        if "experts" in site.within:
            return None
        module: Any = site.spec.module if site.spec is not None else None
        theirs, ours = (
            (ColumnParallelLinear, PlannedColumn)
            if site.role in COLUMNS
            else (RowParallelLinear, PlannedRow)
        )
        if module is not theirs:
            name = getattr(module, "__qualname__", module)
            raise SessionError(
                f"{site.path} is {name}, where {flags} plans {theirs.__qualname__}; use "
                "--transformer-impl local, or drop the flag"
            )
        return site.carry(ours, plan=plan)

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

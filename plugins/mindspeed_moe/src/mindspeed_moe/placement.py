"""Placement of the layer of experts in a specification tree, once for all features of this package."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from mindspeed_core.errors import SessionError
from mindspeed_core.layer_spec import Site, SpecEditor
from mindspeed_kernels.modules.grouped_experts import GroupedExperts
from mindspeed_moe.experts import LaterGroupedExperts, SharedExpertHalves
from mindspeed_moe.layer import LaunchedMoELayer
from mindspeed_moe.options import LayerOptions
from mindspeed_moe.routers import DeviceBalancedRouter, FixedRouter

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mindspeed_core.session import Session

OWNER = "moe-core"
_EXPERTS = "what overlaps or recomputes experts (--moe-*-overlap-comm, --moe-zero-memory, --moe-adaptive-*)"
_OVERLAPS = "--moe-alltoall-overlap-comm or --moe-allgather-overlap-comm"


@dataclass(frozen=True)
class Place:
    """Where a model chunk is.

    Attributes:
        chunk: its virtual pipeline stage.
        chunks: virtual pipeline stages of a rank.
    """

    chunk: int = 0
    chunks: int = 1


def place_layers(
    session: Session,
    spec: Any,
    groups: Callable[[], ProcessGroupCollection],
    options: LayerOptions,
    place: Place,
) -> Any:
    """Return the tree with the parts of layers of experts that the options ask for.

    Args:
        session: counts what is placed.
        spec: the tree.
        groups: returns the process groups.
        options: of the active features.
        place: of the model chunk.

    Raises:
        SessionError: another module than the one that is refined stands at one of the sites.
    """
    editor = SpecEditor(spec, owner=OWNER, session=session)
    if options.fixed_routes:
        editor.replace("router", _refining(TopKRouter, FixedRouter, "--fix-router"))
    if options.device_losses is not None:
        flags = "--moe-device-level-aux-loss-coeff and --moe-comm-aux-loss-coeff"
        editor.replace(
            "router", _refining(TopKRouter, DeviceBalancedRouter, flags, losses=options.device_losses)
        )
    if not options.launches:
        return editor.spec
    if options.overlaps and editor.find("shared_experts"):
        editor.replace("shared_experts", _refining(SharedExpertMLP, SharedExpertHalves, _OVERLAPS))
    if options.own_experts:
        editor.replace("experts", _refining(GroupedExperts, LaterGroupedExperts, _EXPERTS), wrap=True)

    def layer(site: Site) -> ModuleSpec | None:
        if site.spec is None or site.spec.module is not MoELayer:
            return None
        position = int(numbers[0]) if (numbers := re.findall(r"layers\.(\d+)\.", site.path)) else 0
        saves = options.of_layer(position, place.chunk, place.chunks)
        return site.carry(
            LaunchedMoELayer,
            groups=groups,
            overlaps=options.overlaps,
            saves=saves,
            crowded=options.crowded,
            fuses=options.fuses,
        )

    editor.replace("mlp", layer, wrap=True)
    return editor.spec


def _refining(known: type, refined: type, flags: str, **params: Any) -> Callable[[Site], ModuleSpec]:
    def refine(site: Site) -> ModuleSpec:
        module = site.spec.module if site.spec is not None else None
        if module is not known:
            name = getattr(module, "__qualname__", module)
            raise SessionError(
                f"{site.path} is {name}, where {OWNER} refines {known.__qualname__}; drop {flags}, or what "
                "put it there"
            )
        return site.carry(refined, **params)

    return refine

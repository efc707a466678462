"""Placement of the layer of experts in a specification tree, once for all features of this package."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from mindspeed_core.errors import SessionError
from mindspeed_kernels.modules.grouped_experts import GroupedExperts
from mindspeed_megatron.experts import PlainExperts
from mindspeed_megatron.layer_sites import Site
from mindspeed_megatron.layer_spec import SpecEditor
from mindspeed_moe.capacity_dispatcher import CapacityDispatcher
from mindspeed_moe.crowded import Calls
from mindspeed_moe.experts import CopiedExperts, LaterGroupedExperts, SharedExpertHalves
from mindspeed_moe.fused_exchange import (
    BatchedExperts,
    ExchangingExperts,
    StayingPlacesDispatcher,
    StayingRowsDispatcher,
)
from mindspeed_moe.gathered_groups import (
    GatheredGroupsDispatcher,
    GroupsOfGroupedExperts,
    GroupsOfPlainExperts,
)
from mindspeed_moe.gshard_router import GShardRouter
from mindspeed_moe.layer import LaunchedMoELayer
from mindspeed_moe.options import HOT_GROUPS, PLACES, ROWS, LayerOptions
from mindspeed_moe.pipelined_experts import (
    PipelinedDispatcher,
    PipelinedGroupedExperts,
    PipelinedPlainExperts,
    PipelinedRowsDispatcher,
)
from mindspeed_moe.plan_groups import plan_on_this_rank
from mindspeed_moe.routers import DeviceBalancedRouter, FixedRouter
from mindspeed_moe.sliced.gathering import GatheringDispatcher
from mindspeed_moe.sliced.layer import SlicedMoELayer
from mindspeed_moe.sliced.routers import SlicedDeviceBalancedRouter, SlicedGShardRouter, SlicedTopKRouter
from mindspeed_moe.turns import Turns

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mindspeed_core.session import Session

OWNER = "moe-core"
_OVERLAPS = "--moe-alltoall-overlap-comm, --moe-allgather-overlap-comm or --moe-fb-overlap"
_EXPERTS = (
    "what overlaps or recomputes experts (--moe-*-overlap-comm, --moe-fb-overlap, --moe-zero-memory, "
    "--moe-adaptive-*)"
)

_SLICED_ROUTERS: dict[type, type] = {
    DeviceBalancedRouter: SlicedDeviceBalancedRouter,
    GShardRouter: SlicedGShardRouter,
}
_EXCHANGING: dict[str, tuple[type, type, str]] = {
    ROWS: (StayingRowsDispatcher, ExchangingExperts, "--moe-alltoall-mc2"),
    PLACES: (StayingPlacesDispatcher, BatchedExperts, "--moe-bmm-mc2"),
}
"""Dispatcher, experts and flag, by what travels inside products."""


@dataclass(frozen=True)
class Place:
    """Place of a model chunk.

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
    routers = _SLICED_ROUTERS if options.sliced else {}
    if options.fixed_routes:
        editor.replace("router", _refining(TopKRouter, FixedRouter, "--fix-router"))
    if options.device_losses is not None:
        flags = "--moe-device-level-aux-loss-coeff and --moe-comm-aux-loss-coeff"
        editor.replace(
            "router",
            _refining(
                TopKRouter,
                routers.get(DeviceBalancedRouter, DeviceBalancedRouter),
                flags,
                losses=options.device_losses,
            ),
        )
    if options.gshard is not None:
        flags = "--moe-model-type deepspeed_moe"
        router = routers.get(GShardRouter, GShardRouter)
        editor.replace("router", _refining(TopKRouter, router, flags, gshard=options.gshard))
    if options.sliced and options.gshard is None and options.device_losses is None:
        editor.replace("router", _refining(TopKRouter, SlicedTopKRouter, "--ampipe-degree"))
    if not options.launches:
        return editor.spec
    if options.overlaps and editor.find("shared_experts"):
        editor.replace("shared_experts", _refining(SharedExpertMLP, SharedExpertHalves, _OVERLAPS))
    copies = (options.hot_experts, lambda: communicators(session)) if options.hot_experts else None
    if copies:
        editor.replace(
            "experts", _refining(GroupedExperts, CopiedExperts, "--balanced-moe-experts"), wrap=True
        )
    if options.own_experts:
        editor.replace("experts", _refining(GroupedExperts, LaterGroupedExperts, _EXPERTS), wrap=True)
    if options.slices is not None:
        editor.replace("experts", _pipelined_experts, wrap=True)
    if options.exchanges_inside is not None:
        _, experts, flag = _EXCHANGING[options.exchanges_inside]
        editor.replace("experts", _refining(GroupedExperts, experts, flag), wrap=True)
    if options.groups is not None:
        editor.replace("experts", partial(_experts_in_groups, groups=options.groups), wrap=True)

    turns, calls = session.state(Turns), session.state(Calls)

    def layer(site: Site) -> ModuleSpec | None:
        if site.spec is None or site.spec.module is not MoELayer:
            return None
        position = int(numbers[0]) if (numbers := re.findall(r"layers\.(\d+)\.", site.path)) else 0
        saves = options.of_layer(position, place.chunk, place.chunks)
        taking: dict[str, Any] = {"turns": lambda: turns} if options.pairs else {}
        if options.sliced:
            taking["gathers_apart"] = options.gathers_apart
        return site.carry(
            SlicedMoELayer if options.sliced else LaunchedMoELayer,
            groups=groups,
            overlaps=options.overlaps,
            saves=saves,
            crowded=None if options.crowded is None else (options.crowded, lambda: calls),
            fuses=options.fuses,
            plan=(lambda: plan_on_this_rank(session, options.hops, groups())) if options.hops else None,
            **taking,
            dispatcher=_dispatcher(options),
            moves=options.moves,
            copies=copies,
        )

    editor.replace("mlp", layer, wrap=True)
    return editor.spec


def _pipelined_experts(site: Site) -> ModuleSpec:
    grouped = site.spec is not None and site.spec.module is GroupedExperts
    known, refined = (
        (GroupedExperts, PipelinedGroupedExperts) if grouped else (PlainExperts, PipelinedPlainExperts)
    )
    return _refining(known, refined, "--use-pipe-experts")(site)


def _experts_in_groups(site: Site, groups: int) -> ModuleSpec:
    grouped = site.spec is not None and site.spec.module is GroupedExperts
    known, refined = (
        (GroupedExperts, GroupsOfGroupedExperts) if grouped else (PlainExperts, GroupsOfPlainExperts)
    )
    return _refining(known, refined, "--moe-experts-pipeline-degree", groups=groups)(site)


def _dispatcher(options: LayerOptions) -> Callable[..., Any] | None:
    """Return what builds another dispatcher than those of megatron-core's names."""
    if options.gathers_apart:
        return GatheringDispatcher
    if options.exchanges_inside is not None:
        return _EXCHANGING[options.exchanges_inside][0]
    if options.groups is not None:
        return partial(GatheredGroupsDispatcher, groups=options.groups)
    if options.gshard is None or not options.gshard.padded:
        if options.slices is None:
            return None
        return partial(PipelinedRowsDispatcher, apart=options.apart)
    if options.slices is not None:
        return partial(
            PipelinedDispatcher,
            factor=options.gshard.factor,
            multiple=options.slices,
            apart=options.apart,
        )
    return partial(CapacityDispatcher, factor=options.gshard.factor)


def communicators(session: Session) -> list[Any]:
    """Return the communicators of copies of hot experts, which the feature created."""
    return [session.groups[name] for name in session.groups if name.startswith(HOT_GROUPS)]


def _refining(original: type, refined: type, flags: str, **params: Any) -> Callable[[Site], ModuleSpec]:
    def refine(site: Site) -> ModuleSpec:
        module = site.spec.module if site.spec is not None else None
        if module is not original:
            name = getattr(module, "__qualname__", module)
            raise SessionError(
                f"{site.path} is {name}, where {OWNER} refines {original.__qualname__}; drop {flags}, or "
                "what put it there"
            )
        return site.carry(refined, **params)

    return refine

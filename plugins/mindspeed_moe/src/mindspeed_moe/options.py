"""The options of layers of experts, from the arguments of all active features; no torch."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

OVERLAPS = ("moe-alltoall-overlap", "moe-allgather-overlap")
"""Features that compute while tokens travel."""
LAUNCHING = (
    *OVERLAPS,
    *("moe-async-comm", "moe-permute-fusion", "moe-zero-memory", "moe-adaptive-recompute"),
)
"""Features with a dispatcher of this package."""
DISABLED, LEVEL0, LEVEL1, ACTIVATION = "disable", "level0", "level1", "activation"
"""Activations of experts kept for backward: all; the first product's result; none; all but the activation
function's."""


@dataclass(frozen=True)
class DeviceLosses:
    """Losses of balance between the devices that hold experts.

    Attributes:
        balance: coefficient of the balance of what they compute.
        communication: coefficient of the balance of what they are sent.
        devices: how many there are; each holds as many experts, in their order.
        choices: experts of a token.
        reached: devices that a token may go to.
    """

    balance: float
    communication: float
    devices: int
    choices: int
    reached: int


@dataclass(frozen=True)
class LayerOptions:
    """Options of layers of experts: their routes, their communication, and the activations that they keep.

    Attributes:
        overlaps: shared experts and weight gradients are computed while tokens travel.
        saves: `DISABLED`, `LEVEL0` or `LEVEL1`.
        saving_layers: of each pipeline stage, so many layers save like that, the others their activation;
            None for all.
        crowded: times the mean of rows above which a call keeps less; None for never.
        launches: exchanges are launched in one place and waited for in another; otherwise the layer and its
            dispatcher stay megatron-core's.
        fuses: tokens are sorted by expert, and results brought back, by one kernel each.
        fixed_routes: tokens go to experts in turn.
        device_losses: of the router, None for none.
    """

    overlaps: bool
    saves: str = DISABLED
    saving_layers: int | None = None
    crowded: float | None = None
    launches: bool = True
    fuses: bool = False
    fixed_routes: bool = False
    device_losses: DeviceLosses | None = None

    @property
    def own_experts(self) -> bool:
        """Whether experts keep for backward, or compute later, something else than megatron-core's."""
        return self.overlaps or self.saves != DISABLED or self.crowded is not None

    def of_layer(self, position: int, chunk: int, chunks: int) -> str:
        """Return what one layer keeps.

        Args:
            position: of the layer in its model chunk, from 0.
            chunk: virtual pipeline stage of the chunk.
            chunks: virtual pipeline stages of a rank.
        """
        if self.saves == DISABLED or self.saving_layers is None:
            return self.saves
        return self.saves if position * chunks + chunk < self.saving_layers else ACTIVATION


def layer_options(args: Any, active: Container[str]) -> LayerOptions:
    """Return the options of the active features, by name."""
    saves, crowded = "moe-zero-memory" in active, "moe-adaptive-recompute" in active
    return LayerOptions(
        overlaps=any(name in active for name in OVERLAPS),
        saves=args.moe_zero_memory if saves else DISABLED,
        saving_layers=args.moe_zero_memory_num_layers if saves else None,
        crowded=args.moe_adaptive_recompute_activation_scale if crowded else None,
        launches=any(name in active for name in LAUNCHING),
        fuses="moe-permute-fusion" in active,
        fixed_routes="moe-fix-router" in active,
        device_losses=device_losses(args) if "moe-device-losses" in active else None,
    )


def device_losses(args: Any) -> DeviceLosses:
    """Return the losses of balance between devices that arguments ask for."""
    devices, choices = number_of_devices(args), args.moe_router_topk
    return DeviceLosses(
        balance=args.moe_device_level_aux_loss_coeff,
        communication=args.moe_comm_aux_loss_coeff,
        devices=devices,
        choices=choices,
        reached=getattr(args, "moe_router_group_topk", None) or min(choices, devices),
    )


def number_of_devices(args: Any) -> int:
    """Return the groups of experts of the router, or else the ranks that experts are spread over."""
    groups = getattr(args, "moe_router_num_groups", None)
    return int(groups or getattr(args, "expert_model_parallel_size", None) or 1)

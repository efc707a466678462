"""The declarations of mindspeed-moe; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_moe.features.adaptive import AdaptiveRecompute
from mindspeed_moe.features.async_comm import AsyncCommunication
from mindspeed_moe.features.core import ExpertLayer
from mindspeed_moe.features.device_losses import DeviceLevelLosses
from mindspeed_moe.features.fixed_routes import FixedRoutes
from mindspeed_moe.features.overlap import AllGatherOverlap, AllToAllOverlap
from mindspeed_moe.features.permute_fusion import PermuteFusion
from mindspeed_moe.features.sequential_dispatcher import SequentialDispatcher
from mindspeed_moe.features.shared_experts import SharedExpertCount
from mindspeed_moe.features.zero_memory import ZeroMemory

DECLARATIONS = (
    HookApi("1.1"),
    ExpertLayer,
    AsyncCommunication,
    AllToAllOverlap,
    AllGatherOverlap,
    ZeroMemory,
    AdaptiveRecompute,
    SharedExpertCount,
    SequentialDispatcher,
    DeviceLevelLosses,
    FixedRoutes,
    PermuteFusion,
)

__all__ = [
    "DECLARATIONS",
    "AdaptiveRecompute",
    "AllGatherOverlap",
    "AllToAllOverlap",
    "AsyncCommunication",
    "DeviceLevelLosses",
    "ExpertLayer",
    "FixedRoutes",
    "PermuteFusion",
    "SequentialDispatcher",
    "SharedExpertCount",
    "ZeroMemory",
]

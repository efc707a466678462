"""The declarations of mindspeed-moe; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_moe.extension_points import COMM_PLANS
from mindspeed_moe.features.adaptive import AdaptiveRecompute
from mindspeed_moe.features.ampipe import AttentionExpertsPipeline
from mindspeed_moe.features.async_comm import AsyncCommunication
from mindspeed_moe.features.balanced_experts import BalancedExperts
from mindspeed_moe.features.comm_plan import CommunicationPlan
from mindspeed_moe.features.core import ExpertLayer
from mindspeed_moe.features.deepspeed import DeepSpeedExperts, FormerDropless
from mindspeed_moe.features.device_losses import DeviceLevelLosses
from mindspeed_moe.features.expert_placement import ExpertPlacement
from mindspeed_moe.features.experts_pipeline import ExpertsPipeline
from mindspeed_moe.features.fb_overlap import ForwardBackwardOverlap
from mindspeed_moe.features.fixed_routes import FixedRoutes
from mindspeed_moe.features.fused_products import FusedProducts
from mindspeed_moe.features.load_record import LoadRecord
from mindspeed_moe.features.overlap import AllGatherOverlap, AllToAllOverlap
from mindspeed_moe.features.permute_fusion import PermuteFusion
from mindspeed_moe.features.pipe_experts import PipelinedExperts
from mindspeed_moe.features.sequential_dispatcher import SequentialDispatcher
from mindspeed_moe.features.shared_experts import SharedExpertCount
from mindspeed_moe.features.tp_extend_ep import TensorRanksExtendExperts
from mindspeed_moe.features.zero_memory import ZeroMemory

DECLARATIONS = (
    HookApi("1.3"),
    ExpertLayer,
    AsyncCommunication,
    AllToAllOverlap,
    AllGatherOverlap,
    ForwardBackwardOverlap,
    ZeroMemory,
    AdaptiveRecompute,
    SharedExpertCount,
    SequentialDispatcher,
    DeviceLevelLosses,
    FixedRoutes,
    PermuteFusion,
    COMM_PLANS,
    CommunicationPlan,
    TensorRanksExtendExperts,
    LoadRecord,
    DeepSpeedExperts,
    FormerDropless,
    PipelinedExperts,
    ExpertsPipeline,
    FusedProducts,
    AttentionExpertsPipeline,
    ExpertPlacement,
    BalancedExperts,
)

__all__ = [
    "DECLARATIONS",
    "AdaptiveRecompute",
    "AllGatherOverlap",
    "AllToAllOverlap",
    "AsyncCommunication",
    "AttentionExpertsPipeline",
    "BalancedExperts",
    "CommunicationPlan",
    "DeepSpeedExperts",
    "DeviceLevelLosses",
    "ExpertLayer",
    "ExpertPlacement",
    "ExpertsPipeline",
    "FixedRoutes",
    "FormerDropless",
    "ForwardBackwardOverlap",
    "FusedProducts",
    "LoadRecord",
    "PermuteFusion",
    "PipelinedExperts",
    "SequentialDispatcher",
    "SharedExpertCount",
    "TensorRanksExtendExperts",
    "ZeroMemory",
]

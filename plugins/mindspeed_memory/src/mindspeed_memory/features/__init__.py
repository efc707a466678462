"""The declarations of mindspeed-memory; importing them loads neither torch nor megatron.

Declarations about activations and about the optimizer stand in lists of their own.
"""

from __future__ import annotations

from mindspeed_core.feature import Feature, HookApi
from mindspeed_memory.extension_points import OPTIMIZER_STATES
from mindspeed_memory.features.block_optimizer import BlockOptimizer
from mindspeed_memory.features.checkpoint_aliases import CheckpointActivations
from mindspeed_memory.features.compress import CompressActivation, CompressDense
from mindspeed_memory.features.compress_optimizer import CompressOptimizer
from mindspeed_memory.features.early_recompute import RecomputeInAdvance, RecomputeInBubble
from mindspeed_memory.features.memory_fragmentation import MemoryFragmentation
from mindspeed_memory.features.memory_report import MemoryReport
from mindspeed_memory.features.plans import RecomputePlan, SwapPlan
from mindspeed_memory.features.policies import AdaptiveMemory, AdaptiveRecompute, SmartSwap
from mindspeed_memory.features.recompute import (
    RecomputeActivation,
    RecomputeCounts,
    RecomputeDense,
    RecomputeNorm,
)
from mindspeed_memory.features.release_fp32_grad import ReleaseFp32Grad
from mindspeed_memory.features.reuse_fp32_param import ReuseFp32Param
from mindspeed_memory.features.swap import SwapAttention, SwapLayerInput
from mindspeed_memory.features.swap_optimizer import SwapOptimizer
from mindspeed_memory.features.virtual_optimizer import VirtualOptimizer

OPTIMIZER_FEATURES: tuple[type[Feature], ...] = (
    BlockOptimizer,
    ReuseFp32Param,
    ReleaseFp32Grad,
    SwapOptimizer,
    VirtualOptimizer,
    CompressOptimizer,
    MemoryFragmentation,
    MemoryReport,
)


ACTIVATION_FEATURES: tuple[type[Feature], ...] = (
    RecomputeActivation,
    RecomputeNorm,
    RecomputeCounts,
    RecomputeDense,
    RecomputeInAdvance,
    RecomputeInBubble,
    SwapAttention,
    SwapLayerInput,
    CompressActivation,
    CompressDense,
    RecomputePlan,
    SwapPlan,
    AdaptiveRecompute,
    AdaptiveMemory,
    SmartSwap,
    CheckpointActivations,
)


DECLARATIONS = (HookApi("1.3"), OPTIMIZER_STATES, *ACTIVATION_FEATURES, *OPTIMIZER_FEATURES)

__all__ = ["DECLARATIONS"]

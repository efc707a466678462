"""The features that change what is kept of activations between forward and backward."""

from __future__ import annotations

from mindspeed_core.feature import Feature
from mindspeed_memory.features.checkpoint_aliases import CheckpointActivations
from mindspeed_memory.features.compress import CompressActivation, CompressDense
from mindspeed_memory.features.early_recompute import RecomputeInAdvance, RecomputeInBubble
from mindspeed_memory.features.plans import RecomputePlan, SwapPlan
from mindspeed_memory.features.policies import AdaptiveMemory, AdaptiveRecompute, SmartSwap
from mindspeed_memory.features.recompute import (
    RecomputeActivation,
    RecomputeCounts,
    RecomputeDense,
    RecomputeNorm,
)
from mindspeed_memory.features.swap import SwapAttention, SwapLayerInput

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

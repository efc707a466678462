"""Declarations of the fused operators: flags, requirements, proofs. No torch."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_kernels.extension_points import BACKENDS
from mindspeed_kernels.features.activation import FusedSwiGLUFeature
from mindspeed_kernels.features.attention import Alibi, AlibiTensor, FlashAttention, FusionAttentionV2
from mindspeed_kernels.features.backend_choice import OpsBackend
from mindspeed_kernels.features.cross_entropy import FusedCrossEntropy
from mindspeed_kernels.features.fused_adam import FusedAdam
from mindspeed_kernels.features.norm import FusedRMSNormFeature
from mindspeed_kernels.features.numerics import AffinityCrossEntropy, Deterministic
from mindspeed_kernels.features.other_attention import GenerateMask, MaskedSoftmaxFeature, TriangleAttention
from mindspeed_kernels.features.rope import FusedRotaryEmbedding
from mindspeed_kernels.features.upstream import UpstreamFusions
from mindspeed_kernels.features.weight_gradients import (
    GradientAccumulationFusion,
    GroupedExperts,
    GroupedGradientAccumulation,
)

DECLARATIONS = (
    HookApi("1.3"),
    BACKENDS,
    OpsBackend,
    FusedRMSNormFeature,
    FusedSwiGLUFeature,
    FlashAttention,
    FusedRotaryEmbedding,
    FusedCrossEntropy,
    FusedAdam,
    GradientAccumulationFusion,
    GroupedExperts,
    GroupedGradientAccumulation,
    FusionAttentionV2,
    Alibi,
    AlibiTensor,
    TriangleAttention,
    MaskedSoftmaxFeature,
    GenerateMask,
    Deterministic,
    AffinityCrossEntropy,
    UpstreamFusions,
)

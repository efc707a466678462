"""The declarations of mindspeed-models; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_models.features.heads import AttentionBias, EmbeddingNorm, NormHead, ZLoss
from mindspeed_models.features.lora import Lora

DECLARATIONS = (HookApi("1.3"), NormHead, EmbeddingNorm, ZLoss, AttentionBias, Lora)

__all__ = ["DECLARATIONS", "AttentionBias", "EmbeddingNorm", "Lora", "NormHead", "ZLoss"]

"""The declarations of mindspeed-models; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_models.extension_points import RECIPES
from mindspeed_models.features.gemma import GatedGelu, ScaledEmbedding
from mindspeed_models.features.heads import AttentionBias, EmbeddingNorm, NormHead, ZLoss
from mindspeed_models.features.lora import Lora
from mindspeed_models.features.model_recipes import ModelRecipes, NoGate, PaddedVocabulary

DECLARATIONS = (
    *(HookApi("1.3"), RECIPES),
    *(ModelRecipes, PaddedVocabulary, NoGate),
    *(NormHead, EmbeddingNorm, ZLoss, AttentionBias),
    *(GatedGelu, ScaledEmbedding),
    *(Lora,),
)

__all__ = [
    "DECLARATIONS",
    "AttentionBias",
    "EmbeddingNorm",
    "GatedGelu",
    "Lora",
    "ModelRecipes",
    "NoGate",
    "NormHead",
    "PaddedVocabulary",
    "ScaledEmbedding",
    "ZLoss",
]

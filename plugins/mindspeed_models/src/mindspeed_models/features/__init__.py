"""The declarations of mindspeed-models; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_models.extension_points import RECIPES
from mindspeed_models.features.best_of_group import BestOfGroup
from mindspeed_models.features.gemma import GatedGelu, ScaledEmbedding
from mindspeed_models.features.heads import AttentionBias, EmbeddingNorm, NormHead, ZLoss
from mindspeed_models.features.instructions import InstructionData
from mindspeed_models.features.lora import Lora
from mindspeed_models.features.model_recipes import ModelRecipes, NoGate, PaddedVocabulary
from mindspeed_models.features.packing import PackSamples

DECLARATIONS = (
    *(HookApi("1.3"), RECIPES),
    *(ModelRecipes, PaddedVocabulary, NoGate),
    *(NormHead, EmbeddingNorm, ZLoss, AttentionBias),
    *(GatedGelu, ScaledEmbedding, BestOfGroup),
    *(InstructionData, PackSamples),
    *(Lora,),
)

__all__ = [
    "DECLARATIONS",
    "AttentionBias",
    "BestOfGroup",
    "EmbeddingNorm",
    "GatedGelu",
    "InstructionData",
    "Lora",
    "ModelRecipes",
    "NoGate",
    "NormHead",
    "PackSamples",
    "PaddedVocabulary",
    "ScaledEmbedding",
    "ZLoss",
]

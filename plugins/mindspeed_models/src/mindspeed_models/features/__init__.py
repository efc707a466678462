"""The declarations of mindspeed-models; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_models.extension_points import RECIPES
from mindspeed_models.features.model_recipes import ModelRecipes, NoGate, PaddedVocabulary

DECLARATIONS = (HookApi("1.3"), RECIPES, ModelRecipes, PaddedVocabulary, NoGate)

__all__ = ["DECLARATIONS", "ModelRecipes", "NoGate", "PaddedVocabulary"]

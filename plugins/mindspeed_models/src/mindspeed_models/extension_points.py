"""The extension points of mindspeed-models."""

from __future__ import annotations

from mindspeed_core.feature import ExtensionPoint

RECIPES = ExtensionPoint(
    "models.recipes",
    "mindspeed_models.recipes",
    "Model families: rules from config.json to flags, and weight tables",
    check="mindspeed_models.recipe:check_recipe",
)

"""The extension points of mindspeed-models, and what may be registered at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import DeclarationError, ExtensionPoint

RECIPES = ExtensionPoint(
    "models.recipes",
    "mindspeed_models.recipes",
    "Model families: rules from config.json to flags, and weight tables",
    check="mindspeed_models.extension_points:check_recipe",
)


def check_recipe(registered: Any) -> None:
    """Refuse what is registered as a recipe and is none.

    Raises:
        DeclarationError: it is neither a recipe nor several.
    """
    from mindspeed_models.recipe import Recipe

    several = registered if isinstance(registered, Sequence) else (registered,)
    if not several or not all(isinstance(each, Recipe) for each in several):
        raise DeclarationError(f"{registered!r} is no mindspeed_models.recipe.Recipe, nor a tuple of them")

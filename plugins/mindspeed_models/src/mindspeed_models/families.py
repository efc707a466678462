"""The model families there are, built in or from other packages, and the model that flags name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mindspeed_core.discovery.extensions import installed_extensions
from mindspeed_core.errors import guess
from mindspeed_models.config_file import NAME, read_config
from mindspeed_models.extension_points import RECIPES
from mindspeed_models.model_names import BUILT_IN
from mindspeed_models.model_plan import ModelPlan
from mindspeed_models.recipe import Config, Recipe, RecipeError


def families() -> dict[str, Recipe]:
    """Return every installed family by name: the built-in ones first, then those of other packages."""
    found: dict[str, Recipe] = {}
    for module in BUILT_IN:
        found.update({recipe.name: recipe for recipe in _module(module)})
    for contributed in installed_extensions(RECIPES).sound().values():
        for recipe in (contributed,) if isinstance(contributed, Recipe) else contributed:
            found.setdefault(recipe.name, recipe)
    return found


def family_of(config: Config, where: str = NAME) -> Recipe:
    """Return the family that reads a ``config.json``, by its ``model_type``.

    Raises:
        RecipeError: no installed family does, or it is one that is refused.
    """
    kind = config.get("model_type")
    known = {each: recipe for recipe in families().values() for each in recipe.model_types}
    recipe = known.get(kind) if isinstance(kind, str) else None
    if recipe is None:
        remote = config.get("auto_map")
        code = "; its own code (auto_map) is never run" if remote else ""
        raise RecipeError(
            f"{where}: no installed family reads models of type "
            f"{kind!r}{code}{guess(str(kind), list(known))}; "
            "--model NAME says which family it is"
        )
    if recipe.refused:
        raise RecipeError(f"{where}: models of type {kind!r} are not supported: {recipe.refused}")
    return recipe


def named_model(name: str) -> tuple[Recipe, Config | None]:
    """Return the family that ``--model NAME[-SIZE]`` names, and the configuration of the size.

    Raises:
        RecipeError: there is no such family, or it has no such size; names the nearest.
    """
    known = families()
    lower = name.lower().replace("_", "-")
    # Names of families are parts of each other (qwen3, qwen3-moe), and llama-2 is written for llama2.
    for family in sorted(known, key=len, reverse=True):
        pattern = re.escape(family).replace(r"\-", "-?")
        match = re.fullmatch(re.sub(r"([a-z])(\d)", r"\1-?\2", pattern) + r"(?:-(.+))?", lower)
        if match is None:
            continue
        recipe, size = known[family], match[1]
        if recipe.refused:
            raise RecipeError(f"--model {name}: the family {family} is not supported: {recipe.refused}")
        if size is None:
            return recipe, None
        if size not in recipe.sizes:
            raise RecipeError(
                f"--model {name}: the family {family} has no size "
                f"{size!r}{guess(size, list(recipe.sizes))}; it has "
                f"{', '.join(recipe.sizes) or 'none'}"
            )
        return recipe, recipe.sizes[size]
    names = [family for family in known if not known[family].refused]
    spelled = [f"{each}-{size}" for each in names for size in known[each].sizes]
    hint = guess(lower, [*names, *spelled])
    raise RecipeError(f"--model {name}: no such model{hint}; families are {', '.join(names)}")


def listing() -> Mapping[str, Any]:
    """Return one line for each family, with its sizes: for ``--help`` and ``mindspeed-models families``."""
    return {
        name: (recipe.refused and f"refused: {recipe.refused}")
        or f"{recipe.summary} ({', '.join(recipe.sizes)})"
        for name, recipe in families().items()
    }


def _module(name: str) -> tuple[Recipe, ...]:
    found: tuple[Recipe, ...] = import_module(f"mindspeed_models.recipes.{name}").RECIPES
    return found


def described_folder(source: Path, model: str | None) -> tuple[Recipe, ModelPlan]:
    """Return family and plan of the model in a folder; ``model`` names the family where it is given."""
    return described_model(read_config(source, "--input-model-dir"), model, f"--input-model-dir {source}")


def described_model(content: Config, model: str | None, where: str) -> tuple[Recipe, ModelPlan]:
    """Return family and plan of a ``config.json``.

    Args:
        content: of the file.
        model: names the family; None for the one that the content names.
        where: what it comes from, for messages.
    """
    recipe = named_model(model)[0] if model else family_of(content, where)
    return recipe, recipe.make_plan(content)

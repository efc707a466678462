"""A ``config.json`` for a model that has none yet: that of a size of a family."""

from __future__ import annotations

import json
from pathlib import Path

from mindspeed_core.errors import UserError
from mindspeed_models.config_file import NAME, read_config
from mindspeed_models.families import named_model


def write_config(name: str, folder: Path, vocab_size: int | None = None) -> str:
    """Write the ``config.json`` of a model; returns what is to be said.

    Args:
        name: family and size, as ``--model`` takes them.
        folder: receives the file.
        vocab_size: tokens, in place of those of the size.

    Raises:
        UserError: there is no such model, or the folder has another ``config.json``.
    """
    recipe, config = named_model(name)
    if config is None or recipe.config is None:
        sizes = ", ".join(f"{recipe.name}-{size}" for size in recipe.sizes)
        raise UserError(f"{name}: say which size; there are {sizes}")
    if vocab_size is not None:
        config = {**config, "vocab_size": vocab_size}
    written = recipe.config(recipe.make_plan(config))
    path = folder / NAME
    if path.exists():
        if read_config(path) != written:
            raise UserError(f"{path}: holds another model; remove it, or name another folder")
        return f"{path}: is there already"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return f"{path}: {recipe.name}, {name}"

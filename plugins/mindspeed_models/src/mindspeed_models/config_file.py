"""Reading of ``config.json``: the older and the newer spelling of one fact, each key checked once.

Files on hubs spell ``rope_theta`` and ``rope_scaling`` flat and the dtype ``torch_dtype``; transformers 5
nests ``rope_parameters`` and writes ``dtype``. Missing keys take the default of the family, not of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_models.model_names import CONFIG_FILE as NAME
from mindspeed_models.recipe import RecipeError


def read_config(path: str | Path, flag: str = "--model-config") -> dict[str, Any]:
    """Read a ``config.json``, or that of a folder.

    Raises:
        RecipeError: it is missing or no JSON object; names flag and file.
    """
    file = Path(path)
    file = file / NAME if file.is_dir() else file
    if file.exists() and not file.is_file():
        # A pipe that nobody writes to would be waited for without an end.
        raise RecipeError(f"{flag} {file}: is no regular file; name a file or a folder that holds {NAME}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise RecipeError(
            f"{flag} {path}: {file.name}: {reason}; name a file or a folder that holds one"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{flag} {file}: is no JSON ({error}); copy it again") from error
    if not isinstance(found, dict):
        raise RecipeError(f"{flag} {file}: holds no JSON object; copy it again")
    return found


class Keys:
    """The keys of a ``config.json``, with messages that name the key."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Read from this content."""
        self.config = config

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these keys that has one."""
        return next((self.config[n] for n in names if self.config.get(n) is not None), default)

    def count(self, *names: str, default: int | None = None) -> int:
        """Return a positive integer.

        Raises:
            RecipeError: none of the keys is there, or it is something else.
        """
        found = self.get(*names, default=default)
        if type(found) is not int or found < 1:
            said = "is missing" if found is None else f"is {found!r}"
            raise RecipeError(f"{NAME}: {' or '.join(names)} {said}; it is a positive integer")
        return found

    def refuse(self, name: str, reason: str) -> None:
        """Raise `RecipeError` about the value of a key."""
        raise RecipeError(f"{NAME}: {name} is {self.config.get(name)!r}, {reason}")

    def only(self, name: str, *values: Any, reason: str) -> None:
        """Refuse other values of a key; where it is missing it has the first of them."""
        if self.get(name, default=values[0]) not in values:
            self.refuse(name, reason)

    def rope(self) -> dict[str, Any]:
        """Return the parameters of rotary positions in the newer spelling (``rope_theta``, …)."""
        found = dict(self.get("rope_parameters", default={}))
        if not found:
            found = dict(self.get("rope_scaling", default={}))
        found.setdefault("rope_type", found.pop("type", None) or "default")
        theta = found.get("rope_theta")
        found["rope_theta"] = self.get("rope_theta", default=10000.0) if theta is None else theta
        return found

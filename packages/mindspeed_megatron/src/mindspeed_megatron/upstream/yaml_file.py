"""Reading of a YAML file of somebody else's program: plain values alone, nothing in it runs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError

_LARGEST = 1 << 20


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Return what a file holds; an empty one has nothing.

    Raises:
        UserError: the file cannot be read, or is no mapping.
    """
    try:
        yaml: Any = import_module("yaml")
    except ImportError:
        raise UserError(f"{path}: reading it needs the package pyyaml; pip install pyyaml") from None
    try:
        if path.stat().st_size > _LARGEST:
            raise UserError(f"{path}: is larger than a file of options")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read ({said})") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: is no YAML ({' '.join(str(error).split())[:200]})") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: has no arguments; it holds a {type(content).__name__}")
    return content

"""Model families, weights, data, finetuning and generation for mindspeed-core.

``recipes`` describes families, ``weights`` reads and writes their files, ``data`` prepares text and
instructions, ``lora`` places adapters, ``inference`` generates; ``features`` declares the flags. ``load`` and
``from_pretrained`` open a model that generates.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LATER = dict.fromkeys(("from_pretrained", "load"), "mindspeed_models.inference.model")
"""Names that need torch, with their modules: declarations are imported without it."""


def __getattr__(name: str) -> Any:
    """Return a name that is loaded when it is first used."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)

"""Model families, weights, data, finetuning and generation for mindspeed-core.

``recipes`` describes families, ``weights`` reads and writes their files, ``data`` prepares text and
instructions, ``lora`` places adapters, ``inference`` generates; ``features`` declares the flags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mindspeed_models.inference.model import from_pretrained, load

__all__ = ["from_pretrained", "load"]


def __getattr__(name: str) -> Any:
    """Return `load` and `from_pretrained`, which need torch, when they are first used."""
    if name in __all__:
        from mindspeed_models.inference import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

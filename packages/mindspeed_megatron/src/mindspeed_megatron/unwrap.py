"""The chunks of a model, and the model inside the wrappers of data parallelism and mixed precision."""

from __future__ import annotations

from typing import Any


def unwrap(chunk: Any) -> Any:
    """Return the model inside every wrapper of a chunk."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def chunks_of(model: Any) -> list[Any]:
    """Return a list of the chunks of a model, which may be one module or several."""
    return list(model) if isinstance(model, (list, tuple)) else [model]

"""The model inside the wrappers of data parallelism and mixed precision."""

from __future__ import annotations

from typing import Any


def unwrap(chunk: Any) -> Any:
    """Return the model inside every wrapper of a chunk."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk

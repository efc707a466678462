"""The chunks of a model, and the model inside the wrappers of data parallelism and mixed precision."""

from __future__ import annotations

from typing import Any


def unwrap(chunk: Any) -> Any:
    """Return the model inside every wrapper of a chunk.

    Args:
        chunk: a model, or one in ``DistributedDataParallel``, ``Float16Module`` or both.
    """
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def chunks_of(model: Any) -> list[Any]:
    """Return a list of the chunks of a model, which may be one module or several.

    Args:
        model: what ``get_model`` returns, or one module of a loop of somebody's own.
    """
    return list(model) if isinstance(model, (list, tuple)) else [model]

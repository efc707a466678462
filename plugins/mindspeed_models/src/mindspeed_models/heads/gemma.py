"""Gemma's activation and embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.session import Session


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its tanh form."""
    return torch.nn.functional.gelu(x, approximate="tanh")


class _Scaled:
    """The part of an embedding that scales its output."""

    def forward(self: Any, *args: Any, **named: Any) -> Tensor:
        """Return ``[s, b, h]``, or this rank's rows of it."""
        found: Tensor = super().forward(*args, **named)  # type: ignore[misc]
        # In the weights' dtype first, as the published model has it: 55.5 in bfloat16 for 3072.
        weight = self.word_embeddings.weight
        factor = torch.tensor(math.sqrt(self.config.hidden_size), dtype=weight.dtype, device=found.device)
        return found * factor


def scale_embeddings(session: Session, chunks: Sequence[Any], owner: str) -> None:
    """Scale the embeddings of built chunks.

    Args:
        session: counts what is changed.
        chunks: of this rank, not wrapped for data parallelism yet.
        owner: the feature.
    """
    found = 0
    for chunk in chunks:
        embedding: Any = getattr(unwrap(chunk), "embedding", None)
        if embedding is not None:
            kind: Any = type(embedding)
            embedding.__class__ = _scaled(kind)
            found += 1
    session.place(owner, found)


@cache
def _scaled(base: type) -> type:
    found: type = type(f"Scaled{base.__name__}", (_Scaled, base), {})
    return found

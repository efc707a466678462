"""A LayerNorm behind the embedding (Bloom): before dropout, on the rows of the sequence that a rank has."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from mindspeed_megatron.plain_norm import PlainNorm
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.session import Session


class _WithNorm:
    """The part of an embedding that normalizes its output.

    Attributes:
        norm: LayerNorm over ``h``; its gradients are summed over tensor-parallel ranks that share a sequence.
    """

    def add_norm(self: Any) -> None:
        """Create the norm, and take dropout over."""
        config = copy.copy(self.config)
        # A norm of the embedding is a LayerNorm, whatever the layers have.
        config.normalization, config.layernorm_zero_centered_gamma = "LayerNorm", False
        weight = self.word_embeddings.weight
        self.norm = PlainNorm(config, config.hidden_size, eps=config.layernorm_epsilon).to(
            device=weight.device, dtype=weight.dtype
        )
        self.dropout_behind_norm = nn.Dropout(config.hidden_dropout)
        self.embedding_dropout = nn.Identity()

    def forward(self: Any, *args: Any, **named: Any) -> Tensor:
        """Return ``[s, b, h]``, or this rank's rows of it."""
        found: Tensor = super().forward(*args, **named)  # type: ignore[misc]
        dtype = found.dtype
        found = self.norm(found).to(dtype)
        if self.config.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                return self.dropout_behind_norm(found)
        return self.dropout_behind_norm(found)


def normalize_embeddings(session: Session, chunks: Sequence[Any], owner: str) -> None:
    """Put a norm behind the embeddings of built chunks.

    Args:
        session: counts what is changed.
        chunks: of this rank, not wrapped for data parallelism yet.
        owner: the feature.
    """
    found = 0
    for chunk in chunks:
        embedding: Any = getattr(unwrap(chunk), "embedding", None)
        if embedding is None:
            continue
        with torch.no_grad():
            kind: Any = type(embedding)
            embedding.__class__ = _normed(kind)
            embedding.add_norm()
        found += 1
    session.place(owner, found)


@cache
def _normed(base: Any) -> Any:
    return type(f"Normed{base.__name__}", (_WithNorm, base), {})

"""A change of built instances: the forward of the word embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.utils import unwrap_model

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_core.session import Session


def scale_embeddings(session: Session, model: list[MegatronModule], factor: float, *, owner: str) -> None:
    """Multiply what word embeddings return; only the chunk of the first stage has any."""
    for chunk in unwrap_model(model):
        if not chunk.pre_process:
            continue
        embedding = chunk.embedding.word_embeddings
        original = embedding.forward

        def scaled(*args: Any, _original: Any = original, **kwargs: Any) -> torch.Tensor:
            return _original(*args, **kwargs) * factor

        session.instances.set(owner, embedding, "forward", scaled)

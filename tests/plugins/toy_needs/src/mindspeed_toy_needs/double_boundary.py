"""Two times the width between pipeline stages: the hidden state is sent as two halves that are added."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.utils import unwrap_model

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_core.run import BoundarySchema
    from mindspeed_core.session import Session


def doubled(schema: BoundarySchema) -> BoundarySchema:
    """The same tensors with two times the last dimension."""
    tensors = [replace(tensor, shape=(*tensor.shape[:-1], 2 * tensor.shape[-1])) for tensor in schema.tensors]
    return replace(schema, tensors=tuple(tensors))


def split_and_join(session: Session, model: list[MegatronModule], *, owner: str) -> None:
    """Make chunks send ``[s, b, 2h]``, and add the halves of what they receive."""
    for chunk in unwrap_model(model):
        if not chunk.post_process:
            session.instances.set(owner, chunk, "forward", _sending(chunk.forward))
        if not chunk.pre_process:
            session.instances.set(owner, chunk, "set_input_tensor", _receiving(chunk.set_input_tensor))


def _sending(forward: Any) -> Any:
    def send(*args: Any, **kwargs: Any) -> torch.Tensor:
        hidden = forward(*args, **kwargs)
        return torch.cat([0.5 * hidden, 0.5 * hidden], dim=-1)

    return send


def _receiving(set_input_tensor: Any) -> Any:
    def receive(tensors: Any) -> None:
        whole = [tensor if tensor is None else sum(tensor.chunk(2, dim=-1)) for tensor in tensors]
        set_input_tensor(whole)

    return receive

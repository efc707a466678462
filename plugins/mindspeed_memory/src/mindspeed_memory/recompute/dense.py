"""Dense feed-forward layers computed again as a whole, those with biases too.

megatron-core checkpoints the module, whose result is the output and the bias parameter of its second linear
layer. A parameter that a checkpoint returns is no leaf any more, and backward never ends. Here the checkpoint
returns the output alone, and the bias stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from mindspeed_memory.recompute.layers import layers_of

if TYPE_CHECKING:
    from mindspeed_core.session import Session


def recompute_dense(session: Session, chunks: Sequence[Any], owner: str) -> None:
    """Let every dense layer compute its feed-forward part again, in place of megatron-core's checkpoint.

    Args:
        session: takes the changes back when it closes.
        chunks: the model chunks of this rank.
        owner: the feature.
    """
    for placed in layers_of(chunks):
        if isinstance(placed.layer.mlp, MLP):
            session.instances.set(owner, placed.layer, "recompute_mlp", False)
            session.instances.set(owner, placed.layer.mlp, "forward", output_checkpointed(placed.layer.mlp))


def output_checkpointed(mlp: MLP) -> Callable[..., Any]:
    """Return a forward of ``mlp`` that keeps its input alone.

    Args:
        mlp: a feed-forward layer that returns ``(output, bias)``.
    """
    plain = mlp.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (mlp.training and torch.is_grad_enabled()):
            return plain(hidden_states, *args, **kwargs)
        biases: list[Tensor | None] = []

        def output_of(inner: Tensor) -> Tensor:
            output, bias = plain(inner, *args, **kwargs)
            biases[:] = [bias]
            result: Tensor = output
            return result

        output = checkpoint(output_of, False, hidden_states)
        return output, biases[0]

    return forward

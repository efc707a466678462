"""Inputs of layers that are computed again as a whole, kept on the host.

They are all that such a layer keeps. A checkpoint runs its layers without gradients and then saves its input:
the layer that it runs first tells that this is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_memory.recompute.layers import blocks

if TYPE_CHECKING:
    from mindspeed_core.session import Session
    from mindspeed_memory.saved.engine import SavedTensors


_CHECKPOINTED = "_checkpointed_forward"
"""Method of a block that computes layers again."""


def swap_layer_inputs(session: Session, chunks: Sequence[Any], owner: str, engine: SavedTensors) -> None:
    """Put away the inputs of layers that are computed again.

    Not of a pipeline stage's first layer, which the schedule holds too, and not of the model's last one,
    which backward needs at once.

    Args:
        session: takes the changes back when it closes.
        chunks: the model chunks of this rank.
        owner: the feature.
        engine: puts tensors away.
    """
    for _, block in blocks(chunks):
        inputs: set[int] = set()
        config = block.config
        unit = config.recompute_num_layers if config.recompute_method == "uniform" else 1
        count = len(block.layers)
        for index, layer in enumerate(block.layers):
            held = index == 0 and not block.pre_process
            at_once = block.post_process and index // unit == (count - 1) // unit
            if not held and not at_once:
                session.instances.set(owner, layer, "forward", _marking(layer.forward, inputs))
        # From 0.18 on a block calls a function to compute its layers again, and has no method for it.
        name = _CHECKPOINTED if hasattr(block, _CHECKPOINTED) else "forward"
        forward = _clearing(getattr(block, name), inputs)
        scoped = engine.scope(forward, accepts=_among(inputs), apart=True)
        session.instances.set(owner, block, name, scoped)


def _marking(forward: Callable[..., Any], inputs: set[int]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        hidden_states = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden_states, Tensor) and not torch.is_grad_enabled():
            inputs.add(hidden_states.untyped_storage()._cdata)
        return forward(*args, **kwargs)

    return marked


def _among(inputs: set[int]) -> Callable[[Tensor], bool]:
    return lambda tensor: tensor.untyped_storage()._cdata in inputs


def _clearing(forward: Callable[..., Any], inputs: set[int]) -> Callable[..., Any]:
    def cleared(*args: Any, **kwargs: Any) -> Any:
        inputs.clear()
        try:
            return forward(*args, **kwargs)
        finally:
            inputs.clear()

    return cleared

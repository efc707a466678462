"""Bytes that a rank keeps between steps: parameters, gradients and the state of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_iter

from mindspeed_megatron.instruments.memory import storage_bytes
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.run import Run


def state_bytes(run: Run) -> dict[str, int]:
    """Measure what this rank keeps between steps, in bytes of distinct storages.

    Returns:
        ``parameter_bytes`` (parameters and buffers of the model), ``gradient_bytes`` (gradients and gradient
        buffers) and ``optimizer_bytes`` (state and main parameters that are not the model's own).
    """
    # megatron-core's data-parallel wrapper hides Module.buffers behind an attribute of that name.
    chunks = [unwrap(chunk) for chunk in run.model]
    parameters = [p for chunk in chunks for p in (*chunk.parameters(), *chunk.buffers())]
    gradients = [
        gradient
        for parameter in parameters
        for gradient in (getattr(parameter, "main_grad", None), parameter.grad)
        if isinstance(gradient, torch.Tensor)
    ]
    own = storage_bytes(parameters)
    kept = storage_bytes(gradients)
    optimizer: dict[int, int] = {}
    for inner in inner_optimizers(run.optimizer):
        held = [p for group in inner.param_groups for p in group["params"]]
        state = [v for entry in inner.state.values() for v in tree_iter(entry)]
        optimizer.update(storage_bytes(t for t in (*held, *state) if isinstance(t, torch.Tensor)))
    return {
        "parameter_bytes": sum(own.values()),
        "gradient_bytes": sum(size for key, size in kept.items() if key not in own),
        "optimizer_bytes": sum(s for key, s in optimizer.items() if key not in own and key not in kept),
    }


def checkpoint_bytes(run: Run, *, with_optimizer: bool) -> int:
    """Return the bytes that a checkpoint has of this rank: parameters, buffers, the optimizer's state."""
    kept = state_bytes(run)
    return kept["parameter_bytes"] + (kept["optimizer_bytes"] if with_optimizer else 0)


def inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield torch's optimizers inside of megatron-core's, those of a chain one after another."""
    if optimizer is None:
        return
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is not None and hasattr(inner, "param_groups"):
            yield inner

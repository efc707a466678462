"""Any module computed again in backward, whatever it takes and returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.random import checkpoint
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_MADE = object()
"""In the place of a result that the checkpoint returns."""


def checkpointed(module: torch.nn.Module, through: Callable[..., Any] = checkpoint) -> Callable[..., Any]:
    """Return a forward of ``module`` that keeps its inputs alone.

    Parameters among its results (biases that others add) leave as they are: out of a checkpoint they would be
    leaves no more. Where no input learns, backward would not reach the module, and nothing is dropped.

    Args:
        module: takes and returns tensors in any arrangement of tuples, lists and dictionaries.
        through: the checkpoint, called as megatron-core's.
    """
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        learning = [
            index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if not learning:
            return plain(*args, **kwargs)
        tensors = [leaves[index] for index in learning]
        for index in learning:
            leaves[index] = None
        results: list[Any] = []
        arrangement: list[Any] = []

        def made(*inputs: Tensor) -> tuple[Tensor, ...]:
            filled = list(leaves)
            for index, tensor in zip(learning, inputs):
                filled[index] = tensor
            again, options = tree_unflatten(filled, structure)
            found, arranged = tree_flatten(plain(*again, **options))
            results[:] = [_MADE if _is_made(leaf) else leaf for leaf in found]
            arrangement[:] = [arranged]
            return tuple(leaf for leaf in found if _is_made(leaf))

        outputs = iter(through(made, False, *tensors))
        given = [next(outputs) if result is _MADE else result for result in results]
        return tree_unflatten(given, arrangement[0])

    return forward


def _is_made(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, torch.nn.Parameter)

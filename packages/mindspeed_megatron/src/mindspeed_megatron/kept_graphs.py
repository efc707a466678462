"""Results of the last forward pass that megatron-core's modules keep as attributes, with their graphs.

A token dispatcher remembers the probabilities of its tokens. They hold the graph, which holds gradient
accumulators, whose hooks hold the model: a circle through torch's own objects, that Python does not find.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

_EXPERTS = "megatron.core.transformer.moe."
_KNOWN = ("megatron.core.", "mindspeed_")


def let_go_of_graphs(chunks: Sequence[torch.nn.Module], *, of_callers: bool = True) -> None:
    """Cut what modules keep off its graph, at the end of a run.

    Args:
        chunks: the model chunks of the rank, with or without wrappers.
        of_callers: in modules of other packages too; not where their graphs may still be used.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if not of_callers and not type(module).__module__.startswith(_KNOWN):
                continue
            for holder in (module, *_parts(module)):
                for name, value in list(vars(holder).items()):
                    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                        setattr(holder, name, value.detach())


def _parts(holder: Any) -> Iterator[Any]:
    """Yield objects of megatron-core's experts that are no modules: a dispatcher, and what sends for it."""
    for value in list(vars(holder).values()):
        theirs = type(value).__module__.startswith(_EXPERTS) and hasattr(value, "__dict__")
        if theirs and not isinstance(value, torch.nn.Module):
            yield value
            yield from _parts(value)

"""Layers whose forward pass is computed again before their backward pass asks for it.

megatron-core computes a layer again inside of backward, when the gradient from the next pipeline stage has
arrived. All that this takes is the input of the layer, which the rank has: it can be done while the gradient
is on its way. Here a checkpoint is a node of the graph that may be told to do so once; what nobody told in
time is done in backward, as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor

from mindspeed_megatron.instruments.passes import recomputes
from mindspeed_memory.recompute.interleaving import Pass
from mindspeed_memory.recompute.modules import checkpointed

ALL = -1
"""A depth: every layer of a pass."""


@dataclass
class EarlyPasses:
    """State of a session about the layers that are computed again.

    Attributes:
        depth: layers of a pass that are computed again early, those whose backward pass comes first.
        current: the pass whose forward step is running; None outside of training.
        dropped: the passes that drop their activations; None for all of them.
        early: layers computed again before backward asked, so far.
        late: layers computed again in backward, so far.
    """

    depth: int = 1
    current: Pass | None = None
    dropped: frozenset[Pass] | None = None
    early: int = 0
    late: int = 0
    _waiting: dict[Pass, list[weakref.ref[Any]]] = field(default_factory=dict)

    @contextmanager
    def step(self, dropped: frozenset[Pass] | None = None) -> Iterator[None]:
        """Begin and end the passes of a step, of which some drop their activations, or all."""
        self.dropped = dropped
        self._waiting.clear()
        try:
            yield
        finally:
            self.dropped = None
            self._waiting.clear()

    @contextmanager
    def forward_step(self, current: Pass) -> Iterator[None]:
        """Run the forward step of a pass in this block."""
        self.current = current
        try:
            yield
        finally:
            self.current = None

    @property
    def drops(self) -> bool:
        """Return whether the pass that is running drops its activations."""
        return self.current is not None and self.dropped is not None and self.current in self.dropped

    def compute_again(self, one: Pass) -> None:
        """Compute the layers of a pass again whose backward pass comes first, and of no other pass."""
        nodes = [node for known in self._waiting.pop(one, []) if (node := known()) is not None]
        for node in nodes[::-1][: None if self.depth == ALL else self.depth]:
            if _run_again(node):
                self.early += 1

    def add(self, node: Any) -> None:
        """Remember the node of a layer of the pass that is running."""
        if self.current is not None:
            self._waiting.setdefault(self.current, []).append(weakref.ref(node))


def computed_again_early(module: torch.nn.Module, passes: EarlyPasses, *, always: bool) -> Callable[..., Any]:
    """Return a forward of ``module`` that keeps its inputs alone, and can be computed again early.

    Args:
        module: a layer.
        passes: tells when.
        always: in every pass; otherwise in those that drop their activations.
    """
    plain = module.forward

    def through(function: Callable[..., Any], distributed: bool, *tensors: Tensor) -> Any:
        return _Checkpoint.apply(function, passes, *tensors)

    dropping = checkpointed(module, through)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (dropping if always or passes.drops else plain)(*args, **kwargs)

    return forward


class _Checkpoint(torch.autograd.Function):
    """megatron-core's ``CheckpointFunction``, whose second forward pass may come early."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], passes: EarlyPasses, *tensors: Tensor) -> Any:
        ctx.function, ctx.passes, ctx.again = function, passes, None
        ctx.states = random._get_all_rng_states()
        ctx.save_for_backward(*tensors)
        passes.add(ctx)
        with torch.no_grad():
            return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if _run_again(ctx):
            ctx.passes.late += 1
        outputs, inputs = ctx.again
        ctx.again = None
        pairs = [(one, gradient) for one, gradient in zip(outputs, gradients) if one.requires_grad]
        torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
        return None, None, *(one.grad for one in inputs)


@recomputes
def _run_again(node: Any) -> bool:
    """Compute a layer again with the random numbers that it had, unless it was; return whether it was not."""
    if node.again is not None:
        return False
    inputs = [tensor.detach().requires_grad_() for tensor in node.saved_tensors]
    with random._fork_rng(), torch.enable_grad():
        random._set_all_rng_states(*node.states)
        node.again = node.function(*inputs), inputs
    return True

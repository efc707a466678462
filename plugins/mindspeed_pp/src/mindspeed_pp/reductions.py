"""Reduction of gradients and gathering of parameters of a rank's chunks, as its configuration says."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mindspeed_pp.actions import BACKWARD, GATHER, INPUT_GRADIENT, REDUCE, WEIGHT_GRADIENT, Action
from mindspeed_pp.step_parts import Parts, Place


class Reductions:
    """Reductions of gradients and gathering of parameters of one rank's chunks.

    Attributes:
        last_backward: the stage and micro-batch of the last backward pass of each chunk.
        last_weights: likewise of the last gradients of weights.
    """

    def __init__(self, parts: Parts) -> None:
        """Look for what the list starts by itself, and for the last passes of each chunk."""
        self._parts = parts
        self.last_backward: dict[int, Place] = {}
        self.last_weights: dict[int, Place] = {}
        self._reduced: set[int] = set()
        self._gathered: set[int] = set()
        for action in parts.schedule.orders[parts.rank]:
            for part in action.flat():
                self._note(part, parts.schedule.placement.chunk(part.stage))

    def _note(self, part: Action, chunk: int) -> None:
        if part.op in (INPUT_GRADIENT, BACKWARD):
            self.last_backward[chunk] = part.stage, part.microbatch
        if part.op in (WEIGHT_GRADIENT, BACKWARD):
            self.last_weights[chunk] = part.stage, part.microbatch
        if part.op == REDUCE:
            self._reduced.add(chunk)
        if part.op == GATHER:
            self._gathered.add(chunk)

    def gather_at_begin(self) -> None:
        """Start to gather the parameters of chunks for which the list does not."""
        for chunk in range(len(self._parts.models)):
            if chunk not in self._gathered:
                self._gather(chunk)

    def _gather(self, chunk: int) -> None:
        gathers = _of_chunk(self._parts.config.param_sync_func, chunk)
        if gathers is not None:
            gathers(self._parts.models[chunk].parameters())

    def reduce_if_last(self, chunk: int, place: Place) -> None:
        """Start the reduction that is aligned by hand; without alignment hooks start it bucket by bucket."""
        if self.last_weights[chunk] == place and chunk not in self._reduced:
            self._reduce(chunk)

    def _reduce(self, chunk: int) -> None:
        reduces = _of_chunk(self._parts.config.grad_sync_func, chunk)
        if reduces is not None:
            reduces(self._parts.models[chunk].parameters())

    def start_reduction(self, stage: int) -> None:
        """Start the reduction of a chunk; where it does not overlap, there is one at the end."""
        chunk = self._parts.schedule.placement.chunk(stage)
        model = self._parts.models[chunk]
        if self._parts.config.grad_sync_func is not None:
            self._reduce(chunk)
        elif getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False):
            model.start_grad_sync()

    def start_gathering(self, stage: int) -> None:
        """Start to gather parameters where that is aligned; else modules start it when they are called."""
        self._gather(self._parts.schedule.placement.chunk(stage))

    def synchronized(self, chunk: int, last: bool) -> contextlib.ExitStack:
        """Let gradients of one chunk be reduced, and those of no other: chunks may share a parameter."""
        stack = contextlib.ExitStack()
        for other in range(len(self._parts.models)):
            held = _of_chunk(self._parts.config.no_sync_func, other)
            by_hooks = self._parts.config.grad_sync_func is None and chunk not in self._reduced
            syncs = other == chunk and last and by_hooks
            if held is not None and not syncs:
                stack.enter_context(held())
        return stack


def _of_chunk(functions: Any, chunk: int) -> Callable[..., Any] | None:
    """Return one chunk's function of a configuration that has one for all or a list."""
    found: Callable[..., Any] | None = functions[chunk] if isinstance(functions, list) else functions
    return found


def finalize(parts: Parts, tokens: Tensor, *, force_all_reduce: bool | None) -> None:
    """Reduce the gradients of a step as the host does."""
    function = parts.config.finalize_model_grads_func
    if function is None:
        return
    placement = parts.schedule.placement
    if parts.config.calculate_per_token_loss and (
        placement.copies > 1 or placement.loss_rank != parts.schedule.ranks - 1
    ):
        # megatron-core takes the number from the last rank.
        dist.all_reduce(tokens, group=parts.pg.pp)
    offered = {"pg_collection": parts.pg, "force_all_reduce": force_all_reduce or False}
    known = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        offered = {name: value for name, value in offered.items() if name in known}
    function(parts.models, tokens if parts.config.calculate_per_token_loss else None, **offered)

"""Recomputation in segments that end before a sum over tensor-parallel ranks.

A layer is recomputed in two segments, attention and feed-forward, each with the norm before it. Both end
with a row linear, whose sum over ranks makes the segment's result and nothing that its backward pass reads:
the recomputation leaves it out. Under sequence parallelism the gradient of that sum is gathered while the
segment is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel.random import _fork_rng, _get_all_rng_states, _set_all_rng_states
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_core.errors import SessionError
from mindspeed_megatron.instruments.passes import recomputes
from mindspeed_tp.linears import PlannedColumn, PlannedRow
from mindspeed_tp.rows import Pending


@dataclass(frozen=True)
class SegmentOptions:
    """Options of a recomputed layer.

    Attributes:
        attention: leave out the sum at the end of attention.
        feed_forward: leave out the sum at the end of the feed-forward module.
        keep_gathered: keep what a recomputed column linear gathers until its weight's gradient is computed.
    """

    attention: bool = True
    feed_forward: bool = True
    keep_gathered: bool = True


@dataclass(frozen=True)
class SegmentEnd:
    """The linears of a segment, and what its recomputation leaves out.

    Attributes:
        row: the linear whose sum is left out; None leaves out nothing.
        columns: linears that keep what they gather.
    """

    row: PlannedRow | None = None
    columns: tuple[PlannedColumn, ...] = ()

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Compute without the sum in this block."""
        for column in self.columns:
            column.keeps_gathered = True
        if self.row is not None:
            self.row.sums = False
        try:
            yield
        finally:
            for column in self.columns:
                column.keeps_gathered = False
            if self.row is not None:
                self.row.sums = True

    def start_gradient(self, dy: Tensor) -> Pending:
        """Start to bring the gradient ``[s, b, h]`` of the sum back to the products of all ranks."""
        if self.row is not None:
            groups = self.row.communication()
            if groups.reduce is not None and groups.scatter:
                return groups.reduce.start_gather(dy)
        return lambda: dy


class _Seed(torch.autograd.Function):
    """A number whose backward begins that of a product with a gradient that arrives until then."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, gradient: Pending) -> Tensor:
        ctx.arriving = [gradient]
        return product.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.arriving.pop()(), None


class _Segment(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], end: SegmentEnd, x: Tensor) -> Tensor:
        ctx.run, ctx.end, ctx.random = run, end, _get_all_rng_states()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    @once_differentiable
    @recomputes
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("recomputed segments learn in .backward(), not in torch.autograd.grad()")
        (saved,) = ctx.saved_tensors
        end: SegmentEnd = ctx.end
        gradient = end.start_gradient(gradients[0].contiguous())
        x = saved.detach().requires_grad_()
        with _fork_rng():
            _set_all_rng_states(*ctx.random)
            with torch.enable_grad(), end.recomputing():
                end_of_product = _Seed.apply(ctx.run(x), gradient)
        # Nobody holds product and gradient on: each is freed where the segment's backward is done with it.
        del gradient
        torch.autograd.backward(end_of_product)
        assert x.grad is not None
        return None, None, x.grad


def segment(run: Callable[[Tensor], Tensor], end: SegmentEnd, x: Tensor) -> Tensor:
    """Compute ``run(x)`` and keep only ``x`` for backward, where it is computed again.

    Args:
        run: from ``[s, b, h]`` to ``[s, b, h]``; its parameters learn, nothing else it reads does.
        end: what the recomputation leaves out.
        x: the input. Where it needs no gradient nothing is recomputed: parameters behind it would not learn.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return run(x)
    result: Tensor = _Segment.apply(run, end, x)
    return result


class SegmentedLayer:
    """Mixin of a transformer layer that is recomputed in segments.

    The norms of the layer hand their input on; attention and feed-forward begin with them.
    """

    input_layernorm: Any
    pre_mlp_layernorm: Any
    self_attention: Any
    mlp: Any

    def __init__(self, *args: Any, segments: SegmentOptions, **named: Any) -> None:
        """Build the layer.

        Args:
            args: of the layer.
            segments: how it is recomputed.
            named: of the layer.
        """
        super().__init__(*args, **named)
        self._attention_end = _end(self.self_attention, "linear_proj", segments.attention, segments)
        self._mlp_end = _end(self.mlp, "linear_fc2", segments.feed_forward, segments)
        # Bound methods follow a layer that is copied.
        self.input_layernorm.forward = self._handed_on
        self.pre_mlp_layernorm.forward = self._handed_on
        self.self_attention.forward = self._attend
        self.mlp.forward = self._feed_forward

    def _handed_on(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def _attend(self, hidden_states: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        return _in_segment(
            self.input_layernorm, self.self_attention, self._attention_end, hidden_states, args, named
        )

    def _feed_forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        return _in_segment(self.pre_mlp_layernorm, self.mlp, self._mlp_end, hidden_states, args, named)


def _in_segment(
    norm: Any, module: Any, end: SegmentEnd, x: Tensor, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    learning = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
    if any(value.requires_grad for value in learning):
        raise SessionError(
            f"{type(module).__name__} is given a tensor that learns besides the hidden states, which a "
            "recomputed segment would cut off; use --optimize-recomp-communication-level 0"
        )
    biases: list[Tensor | None] = []

    def run(hidden_states: Tensor) -> Tensor:
        normed = type(norm).forward(norm, hidden_states)
        result, bias = type(module).forward(module, normed, *args, **named)
        biases.append(bias)
        return result

    result = segment(run, end, x)
    return result, biases[0]


def _end(module: Any, row_name: str, wanted: bool, options: SegmentOptions) -> SegmentEnd:
    row = getattr(module, row_name, None)
    columns = tuple(part for part in module.modules() if isinstance(part, PlannedColumn))
    kept = columns if options.keep_gathered else ()
    if not wanted or not isinstance(row, PlannedRow):
        return SegmentEnd(columns=kept)
    if row.bias is not None and not row.skip_bias_add:
        raise SessionError(
            f"{row_name} adds its bias itself, which the recomputation would add once per rank"
        )
    return SegmentEnd(row, kept)


@cache
def segmented(layer: type) -> type:
    """Return a subclass of a transformer layer that is recomputed in segments."""
    return type(f"Segmented{layer.__name__}", (SegmentedLayer, layer), {})

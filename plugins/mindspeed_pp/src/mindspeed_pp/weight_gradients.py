"""Linears whose weight gradient is computed when the schedule says so.

In a backward pass to the input alone, a linear leaves what its weight gradient is made of in a store, under
the stage and micro-batch that run; the action ``W`` computes it. In a whole backward pass nothing is left.
The gradient is handed to data parallelism by megatron-core's own hook for delayed weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim
from torch import Tensor

from mindspeed_core.errors import SessionError, UserError
from mindspeed_megatron.layer_sites import Site
from mindspeed_megatron.layer_spec import ANY_LAYOUT, SpecEditor
from mindspeed_megatron.linear_layout import is_opaque
from mindspeed_pp.swaps import HostCopies, Kept

if TYPE_CHECKING:
    from mindspeed_core.session import Session

ROLES = (
    *("qkv", "q", "kv", "proj", "fc1", "fc2"),
    *("q_proj", "q_up_proj", "kv_up_proj"),
    "experts",
)
"""Linears of dense layers, of latent and cross attention and of single experts; grouped experts."""
COMPRESSING = ("linear_q_down_proj", "linear_kv_down_proj")
"""Of latent attention, which builds them of classes of megatron-core alone; changed once they are built."""

Key = tuple[int, int]


@dataclass
class Later:
    """A weight gradient that was put off.

    Attributes:
        compute: called with the operands.
        operands: on the device, or kept wherever they are.
    """

    compute: Callable[..., None]
    operands: tuple[Tensor | Kept, ...]


@dataclass
class WeightGradients:
    """The weight gradients that were put off, of the step in progress.

    Attributes:
        leaves: stage and micro-batch of the backward pass that leaves them; None where none are left.
        work: what is left to compute, by stage and micro-batch.
        seen: how many have been left since the session began.
    """

    leaves: Key | None = None
    work: dict[Key, list[Later]] = field(default_factory=dict)
    seen: int = 0

    def leave(self, compute: Callable[..., None], *operands: Tensor) -> None:
        """Keep a gradient for `run`, or compute it at once in a whole backward pass.

        Args:
            compute: called with the operands.
            operands: what the gradient is made of; they may go to the host in between.
        """
        if self.leaves is None:
            compute(*operands)
        else:
            self.work.setdefault(self.leaves, []).append(Later(compute, operands))
            self.seen += 1

    def run(self, key: Key) -> None:
        """Compute what the backward pass of a stage and micro-batch left."""
        for later in self.work.pop(key, ()):
            later.compute(*(each.tensor() if isinstance(each, Kept) else each for each in later.operands))

    def go(self, key: Key, copies: HostCopies) -> None:
        """Send the operands of a stage and micro-batch to the host, each tensor once."""
        known: dict[int, Kept] = {}
        for later in self.work.get(key, ()):
            for each in later.operands:
                if isinstance(each, Tensor) and id(each) not in known:
                    known[id(each)] = Kept(copies, each)
            later.operands = tuple(known[id(e)] if isinstance(e, Tensor) else e for e in later.operands)
        for kept in known.values():
            kept.leave()

    def come(self, key: Key) -> None:
        """Bring the operands of a stage and micro-batch back."""
        for later in self.work.get(key, ()):
            for each in later.operands:
                if isinstance(each, Kept):
                    each.come()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        module: Any,
        gathers: bool,
        reduces: bool,
        group: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module, ctx.gathers, ctx.reduces, ctx.group = module, gathers, reduces, group
        ctx.has_bias = bias is not None
        output = torch.matmul(_gather_along_first_dim(x, group) if gathers else x, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        gathers, group = ctx.gathers, ctx.group
        to_input = gradient.matmul(weight)
        handle = None
        if ctx.reduces:
            handle = dist.all_reduce(to_input, group=group, async_op=True)
        elif gathers:
            whole = to_input.contiguous()
            to_input = torch.empty_like(x)
            handle = dist.reduce_scatter_tensor(to_input, whole, group=group, async_op=True)
        flat = gradient.reshape(-1, gradient.shape[-1])

        module = ctx.module

        @torch.no_grad()
        def compute(x: Tensor, flat: Tensor) -> None:
            total = _gather_along_first_dim(x, group) if gathers else x
            module.add_weight_gradient(total.reshape(-1, total.shape[-1]), flat)

        module.weight_gradients.leave(compute, x, flat)
        to_bias = flat.sum(dim=0) if ctx.has_bias else None
        if handle is not None:
            handle.wait()
        return to_input, None, to_bias, None, None, None, None


class _Later:
    """The part of a linear that knows when its weight gradient is computed."""

    weight: Any
    weight_gradients: WeightGradients
    _done: Callable[..., Any] | None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[..., Any]) -> None:
        """Take megatron-core's hook that adds a gradient to the main gradient and starts its reduction."""
        self._done = hook

    def add_weight_gradient(self, total: Tensor, gradient: Tensor) -> None:
        """Compute a weight gradient, add it and hand it on.

        Args:
            total: ``[m, k]``, the input of the linear.
            gradient: ``[m, n]``, of its output.

        Raises:
            SessionError: data parallelism would never hear of it.
        """
        weight = self.weight
        main = getattr(weight, "main_grad", None)
        if self._done is None and main is not None:
            raise SessionError(
                "gradients of weights come later in this pipeline schedule, and data parallelism does not "
                "wait for them; wrap the model with the options of session.ddp_config(...)"
            )
        if self._fused and main is not None:
            fused: Any = layers.fused_weight_gradient_mlp_cuda
            add = fused.wgrad_gemm_accum_fp32 if main.dtype == torch.float32 else fused.wgrad_gemm_accum_fp16
            add(total, gradient, main)
            weight.grad_added_to_main_grad = True
            # megatron-core asks whether there is a gradient, and drops it.
            weight.grad = weight.detach()
        else:
            made = gradient.t().matmul(total)
            weight.grad = made if weight.grad is None else weight.grad + made
        if self._done is not None:
            self._done()

    def product(
        self, otherwise: Callable[..., Tensor], input: Tensor, weight: Tensor, *args: Any, **named: Any
    ) -> Tensor:
        """Return what megatron-core's ``_forward_impl`` returns.

        Args:
            otherwise: that function, for weights that have no gradient or are not this linear's.
            input: ``[s, b, k]``.
            weight: ``[n, k]``.
            args: further ones of that function.
            named: likewise.
        """
        if weight is not self.weight or not weight.requires_grad:
            return otherwise(input, weight, *args, **named)
        self._fused = bool(named.get("gradient_accumulation_fusion"))
        output: Tensor = _Linear.apply(
            input,
            weight,
            named.get("bias"),
            self,
            bool(named.get("sequence_parallel")),
            bool(named.get("allreduce_dgrad")),
            named.get("tp_group"),
        )
        return output

    _fused = False


class _OfInstance(_Later):
    """The same for a linear that is built already."""

    def __init__(self, linear: Any, store: WeightGradients) -> None:
        self.weight, self.weight_gradients, self._done = linear.weight, store, None


def change_built_linears(session: Session, chunk: Any, owner: str, *, output_layer: bool) -> None:
    """Let linears of a chunk that no layer specification reaches leave their weight gradient.

    Args:
        session: takes the changes back when it closes.
        chunk: of the model, not wrapped for data parallelism yet.
        owner: the feature.
        output_layer: that one too, where it has a weight of its own.
    """
    store = session.state(WeightGradients)
    found: list[Any] = [
        linear
        for module in chunk.modules()
        for name in COMPRESSING
        if isinstance(linear := getattr(module, name, None), ColumnParallelLinear)
        and type(linear)._forward_impl is ColumnParallelLinear._forward_impl
    ]
    last = getattr(chunk, "output_layer", None)
    if output_layer and last is not None and not chunk.share_embeddings_and_output_weights:
        if is_opaque(last):
            raise UserError(
                f"--pipeline-w-output-layer: the output layer is {type(last).__name__}, which computes "
                "more than the product with its weight, so that its gradient cannot come later; drop the flag"
            )
        found.append(last)
    for linear in found:
        later = _OfInstance(linear, store)
        linear.weight.skip_backward_post_hook = True
        # Data parallelism looks for this method; megatron-core's linears do not have it.
        linear.register_wgrad_accumulation_and_reduce_hooks = (
            later.register_wgrad_accumulation_and_reduce_hooks
        )
        forward = partial(later.product, partial(type(linear)._forward_impl, linear))
        session.instances.set(owner, linear, "_forward_impl", forward)


@cache
def with_later_gradients(base: type) -> type:
    """Return a subclass of a parallel linear that takes ``store``, a function that returns the store."""

    class LaterLinear(_Later, base):
        def __init__(self, *args: Any, store: Callable[[], WeightGradients], **named: Any) -> None:
            super().__init__(*args, **named)
            self.weight_gradients = store()
            self._done = None
            weight: Any = self.weight
            if weight is not None:
                weight.skip_backward_post_hook = True
            self.put_off_weight_gradients(self.weight_gradients.leave)

        def put_off_weight_gradients(self, leave: Callable[..., None]) -> None:
            """Tell classes that derive from this one, and have more weights, who takes computations."""

        def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **named: Any) -> Tensor:
            return self.product(super()._forward_impl, input, weight, *args, **named)

    LaterLinear.__name__ = LaterLinear.__qualname__ = f"Later{base.__name__}"
    return LaterLinear


@cache
def leaving_to_the_schedule(base: type) -> type:
    """Return such a subclass of a linear that can compute its weight gradient apart by itself."""

    class LaterLinear(base):
        def __init__(self, *args: Any, store: Callable[[], WeightGradients], **named: Any) -> None:
            super().__init__(*args, **named)
            self.put_off_weight_gradients(store().leave)

    LaterLinear.__name__ = LaterLinear.__qualname__ = f"Later{base.__name__}"
    return LaterLinear


def place_later_linears(session: Session, spec: Any, owner: str) -> Any:
    """Replace the linears of a chunk by ones whose weight gradient can come later; returns the edited copy.

    Raises:
        UserError: no linear of any layer can; the message names their classes.
    """
    editor = SpecEditor(spec, owner=owner, session=session)
    # Not the session: parts of a specification are copied.
    store = _store_of(session)
    others: set[str] = set()
    layers_seen = 0

    def later(site: Site) -> Any:
        nonlocal layers_seen
        module: Any = site.spec.module if site.spec is not None else None
        layers_seen += site.role != "experts"
        if isinstance(module, type) and getattr(module, "put_off_weight_gradients", None) is not None:
            return site.carry(leaving_to_the_schedule(module), store=store)
        if isinstance(module, type) and issubclass(module, (ColumnParallelLinear, RowParallelLinear)):
            return site.carry(with_later_gradients(module), store=store)
        if site.role == "experts":
            return None
        named = getattr(module, "__name__", str(module))
        others.add(f"{named} of {site.placed_by}" if site.placed_by else named)
        return None

    if not editor.replace(ROLES, later, wrap=True, layouts=ANY_LAYOUT) and layers_seen:
        raise UserError(
            "--pipeline-schedule: it computes gradients of weights apart, and no linear of this model can "
            f"({', '.join(sorted(others))}). Use --transformer-impl local, or the schedule 1f1b or "
            "interleaved, or drop the feature that put them there; a module around a linear says with wraps "
            "which argument holds it"
        )
    return editor.spec


def _store_of(session: Session) -> Callable[[], WeightGradients]:
    store = session.state(WeightGradients)

    def get() -> WeightGradients:
        return store

    return get

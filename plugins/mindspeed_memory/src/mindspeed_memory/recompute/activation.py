"""Activation functions of feed-forward layers computed again in backward.

The second linear layer saves the activation for its own backward pass. Its storage is emptied after forward,
and filled again when the gradient of that layer's output arrives, which is before anybody reads it; what the
activation itself would keep is computed again at the same time. megatron-core's ``CheckpointWithoutOutput``
does both; here is where it begins and ends. Which activation a feed-forward layer has, with which bias, gate
and scale, stays what the layer's own forward says: it runs on a stand-in whose linear layers do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_memory.recompute.layers import computes_part_again, layers_of, selection_of

if TYPE_CHECKING:
    from mindspeed_core.session import Session

Pair = tuple[Tensor, "Tensor | None"]


def recompute_activations(
    session: Session,
    chunks: Sequence[Any],
    owner: str,
    *,
    count: int | None,
    per_rank: bool,
    swaps: bool = False,
    experts: bool = True,
) -> None:
    """Let the chosen layers compute their activation functions again.

    Args:
        session: takes the changes back when it closes.
        chunks: the model chunks of this rank.
        owner: the feature.
        count: layers of each chunk, or of the rank; None for all that are not computed again as a whole.
        per_rank: ``count`` is of the pipeline rank.
        swaps: see `selection_of`.
        experts: routed experts are among what is computed again.
    """
    selection = selection_of(chunks, per_rank=per_rank, swaps=swaps)
    for placed in layers_of(chunks):
        if computes_part_again(placed, selection, count):
            for module in _feed_forward(placed.layer.mlp, experts):
                if isinstance(module, MLP):
                    session.instances.set(owner, module, "forward", recomputing(module))
                else:
                    session.instances.set(owner, module, "activation_recompute", True)


def _feed_forward(mlp: Any, with_experts: bool) -> list[Any]:
    """Return the modules of a layer that have an activation function, routed experts only if asked."""
    if isinstance(mlp, MLP):
        return [mlp]
    if not isinstance(mlp, MoELayer) or mlp.moe_layer_recompute:
        return []
    experts: Any = mlp.experts
    grouped = hasattr(experts, "activation_recompute")
    found = [experts] if grouped else [e for e in getattr(experts, "local_experts", ()) if isinstance(e, MLP)]
    if not with_experts:
        found = []
    shared = mlp.shared_experts
    # Overlapped shared experts are called in parts, around the communication of the routed ones.
    if (
        shared is not None
        and not shared.config.moe_shared_expert_overlap
        and not mlp.shared_experts_recompute
    ):
        found.append(shared)
    return found


def recomputing(mlp: MLP) -> Callable[..., Any]:
    """Return a forward of ``mlp`` that drops its activation until backward needs it.

    Args:
        mlp: megatron-core's feed-forward layer, or its shared expert.

    Raises:
        UserError: its forward is of another class, which may have no two linear layers around an activation.
    """
    computes = next(base for base in type(mlp).__mro__ if "forward" in vars(base))
    if computes is not MLP and not issubclass(computes, SharedExpertMLP):
        raise UserError(
            f"--recompute-activation-function: the activation inside of {computes.__name__} cannot be told "
            "apart; drop the flag, or what placed that module"
        )
    plain = mlp.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (mlp.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        view = _seen_as(mlp)
        return type(view).forward(view, *args, **kwargs)

    return forward


def _seen_as(mlp: MLP) -> Any:
    """Return the module itself, its parameters and submodules, as an object whose class recomputes."""
    view = object.__new__(_recomputing_class(mlp.__class__))
    object.__setattr__(view, "__dict__", mlp.__dict__)
    return view


@cache
def _recomputing_class(base: Any) -> Any:
    if not issubclass(base, SharedExpertMLP):
        return _with_dropped_activation(base)
    # Its forward calls that of `MLP`, which the class in between takes the place of.
    return type(f"Recomputing{base.__name__}", (base, _with_dropped_activation(MLP)), {})


@cache
def _with_dropped_activation(base: Any) -> Any:
    def forward(
        self: Any, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> Pair:
        """Compute ``[s, b, h]`` and the bias that the caller adds."""

        def activate(inner: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
            activated: Tensor = base.forward(_ActivationOnly(self), (inner, bias), scale, **kwargs)[0]
            return activated

        checkpoint = CheckpointWithoutOutput()
        inner, inner_bias = self.linear_fc1(hidden_states)
        activated = checkpoint.checkpoint(activate, inner, inner_bias, per_token_scale)
        output, bias = self.linear_fc2(activated)
        checkpoint.discard_output_and_register_recompute(output)
        if per_token_scale is not None and bias is not None:
            output = output + bias.unsqueeze(0) * per_token_scale.unsqueeze(-1)
            bias = None
        return output, bias

    return type(f"Recomputing{base.__name__}", (base,), {"forward": forward})


class _Given(torch.nn.Module):
    """First linear layer that passes on output and bias; megatron-core 0.18 calls nothing but modules."""

    def forward(self, pair: Pair) -> Pair:
        return pair


class _Untouched(torch.nn.Module):
    """Second linear layer that passes on the activation."""

    def forward(self, activated: Tensor) -> tuple[Tensor, None]:
        return activated, None


class _ActivationOnly:
    """A feed-forward layer whose linear layers pass on what they get."""

    linear_fc1 = _Given()
    linear_fc2 = _Untouched()

    def __init__(self, mlp: Any) -> None:
        self._mlp = mlp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mlp, name)

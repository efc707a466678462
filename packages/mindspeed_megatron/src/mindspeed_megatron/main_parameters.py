"""Update rules that keep main parameters themselves, in a form of their own, and read gradients as they are.

megatron-core keeps a float32 copy of every 16-bit parameter and makes a float32 copy of every 16-bit
gradient. A rule that derives from `MainParameterOptimizer` gets the model's 16-bit parameters themselves
(with the distributed optimizer this rank's parts of them) and their gradients out of the buffers; where and
in which form the float32 values live is its own affair. megatron-core makes no copies then, and its
checkpoints, its norm of gradients, its clipping and its loss scale give the same numbers as before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mindspeed_megatron.described_optimizer import DescribedOptimizer

Changes = list[tuple[Any, str, Any]]
"""Instances, an attribute of each, and its new value."""
_FLAG = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
"""megatron-core's own field for optimizers that keep main parameters, derived from others."""


class MainParameterOptimizer(DescribedOptimizer):
    """A `DescribedOptimizer` whose parameters may be of 16 bits, and whose main parameters are its own.

    `mindspeed_core.put_inside` puts it in place. A parameter of 16 bits has its gradient in
    ``decoupled_grad``, in the dtype of the buffer; `gradient_of` finds it for either kind, and
    `float32_gradient` makes the numbers of it that Adam would have seen. Parameters of float32 are updated
    in place.

    Attributes:
        inverse_scale: what gradients are multiplied by for the loss scale, a scalar tensor; None for none.
        clip_factor: what they are multiplied by next, to be clipped; None for none.
    """

    inverse_scale: torch.Tensor | None = None
    clip_factor: float | None = None

    @abstractmethod
    def main_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the float32 value of a parameter, in its shape; anywhere, and not to be changed."""

    @abstractmethod
    def take_main_parameter(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Set the float32 value of a parameter, and the parameter with it."""

    @abstractmethod
    def forget_main_parameter(self, parameter: torch.Tensor) -> None:
        """Start again from the parameter, which was overwritten from outside."""

    def adopt_main_parameter(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Take over megatron-core's float32 copy of a parameter before the first step.

        By default it is left to be freed, since `new_state` starts from the parameter itself.
        """

    @staticmethod
    def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of a parameter in the dtype and memory that it was reduced in."""
        gradient: torch.Tensor | None = getattr(parameter, "decoupled_grad", None)
        return parameter.grad if gradient is None else gradient

    def float32_gradient(self, part: torch.Tensor) -> torch.Tensor:
        """Return a part of a gradient in float32, unscaled and clipped; the part stays as it is."""
        result = part.float()
        for factor in (self.inverse_scale, self.clip_factor):
            if factor is not None:
                result = result * factor if result is part else result.mul_(factor)
        return result


def wants_main_parameters(config: Any) -> None:
    """Let megatron-core make no float32 copies in the first place, where it can do without.

    Args:
        config: its ``OptimizerConfig``, before an optimizer is built from it.
    """
    if config.use_distributed_optimizer and (config.bf16 or config.fp16):
        setattr(config, _FLAG, True)


def holds_16_bit_parameters(part: Any) -> bool:
    """Return whether one of megatron-core's optimizers has float32 copies of parameters, or could have."""
    groups = "shard_float16_groups" if _sharded(part) else "float16_groups"
    return bool(part.config.bf16 or part.config.fp16) and hasattr(part, groups)


def hand_over(part: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Replace float32 copies by the 16-bit parameters that they copy, in the groups of the inner optimizer.

    What megatron-core keeps in place of each copy has its shape and no memory, so that whoever reads it
    fails.

    Args:
        part: an optimizer of megatron-core's, freshly built.

    Returns:
        Parameters that had a copy, each with it.
    """
    copies, own = (
        (part.shard_fp32_from_float16_groups, part.shard_float16_groups)
        if _sharded(part)
        else (part.fp32_from_float16_groups, part.float16_groups)
    )
    found = [
        (parameter, copy)
        for parameters, mains in zip(own, copies)
        for parameter, copy in zip(parameters, mains)
        if copy is not None
    ]
    of_copy = {id(copy): parameter for parameter, copy in found}
    for group in part.optimizer.param_groups:
        group["params"] = [of_copy.get(id(parameter), parameter) for parameter in group["params"]]
    for mains in copies:
        mains[:] = [None if copy is None else torch.empty_like(copy, device="meta") for copy in mains]
    for groups in (part.model_float16_groups,) if _sharded(part) else (part.float16_groups,):
        for parameter in (parameter for group in groups for parameter in group):
            # Whoever looks for it makes a float32 copy of the parameter instead.
            vars(parameter).pop("main_param", None)
    return found


def changes(part: Any, inner: MainParameterOptimizer) -> Changes:
    """Return the changes of a megatron-core optimizer around an inner one that keeps main parameters."""
    methods: dict[str, Any] = {
        "_copy_model_params_to_main_params": partial(_forget, part, inner),
        "_unscale_main_grads_and_check_for_nan": partial(_check_for_nan, part, inner),
    }
    if not _sharded(part):
        methods |= {
            "_copy_model_grads_to_main_grads": partial(_lend_gradients, inner),
            "_copy_main_params_to_model_params": _nothing,
            "zero_grad": partial(_zero_grad, part),
            "state_dict": partial(_state, part, inner),
            "load_state_dict": partial(_load_state, part, inner),
        }
    found: Changes = [(part, name, method) for name, method in methods.items()]
    if not getattr(part.config, _FLAG):
        found.append((part.config, _FLAG, True))
    return found


def clipping_changes(optimizer: Any, inner: Sequence[MainParameterOptimizer]) -> Changes:
    """Return what has to change in the whole optimizer, so that gradients are clipped as they are read.

    Args:
        optimizer: what is stepped: a chain of optimizers, or one.
        inner: the inner optimizers of all of them.
    """
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    norm = partial(_norm, optimizer, chained)
    if not isinstance(optimizer, ChainedOptimizer):
        return [
            (optimizer, "clip_grad_norm", partial(_clip, norm, inner)),
            (optimizer, "get_grad_norm", norm),
        ]
    largest = optimizer.config.clip_grad
    # The configuration is shared by the chain, which would scale the gradients where they lie.
    return [
        (optimizer, "get_grad_norm", partial(_clip, norm, inner, largest)),
        (optimizer.config, "clip_grad", 0.0),
    ]


def _sharded(part: Any) -> bool:
    return isinstance(part, DistributedOptimizer)


def _nothing() -> None:
    return None


def _clip(norm: Callable[[], float], inner: Sequence[MainParameterOptimizer], largest: float) -> float:
    """Return the norm of all gradients, and let the next step clip them by it."""
    total = norm()
    factor = largest / (total + 1.0e-6) if largest > 0.0 else 1.0
    for optimizer in inner:
        optimizer.clip_factor = factor if factor < 1.0 else None
    return total


@torch.no_grad()
def _norm(optimizer: Any, chained: Sequence[Any]) -> float:
    """Return the norm of the gradients, as megatron-core takes it of float32 copies."""
    if len(chained) == 1 or optimizer.grads_states_parallel_group_is_shared():
        group = chained[0].get_grad_stats_parallel_group()
        return _norm_of([norm for part in chained for norm in _norms(part)], group)
    squares = [_norm_of(list(_norms(part)), part.get_grad_stats_parallel_group()) ** 2 for part in chained]
    return float(sum(squares) ** 0.5)


def _norms(part: Any) -> Iterator[torch.Tensor]:
    """Yield the norm of each gradient that counts on this rank, in float32, without a copy of it."""
    if getattr(part, "is_stub_optimizer", False):
        return
    scale = getattr(part.optimizer, "inverse_scale", None)
    for gradient in _gradients_of_norm(part):
        if scale is None:
            yield torch.linalg.vector_norm(gradient, dtype=torch.float32)
        else:
            # The norm of what was unscaled, which rounds.
            yield torch.linalg.vector_norm(gradient.float() * scale)


def _gradients_of_norm(part: Any) -> list[torch.Tensor]:
    """Return the gradients that count on this rank, by the method's name of the installed megatron-core."""
    # Renamed in 0.19.
    older = getattr(part, "get_main_grads_for_grad_norm", None)
    found: list[torch.Tensor] = (older or part.get_grads_for_grad_norm)()
    return found


def _norm_of(norms: list[torch.Tensor], group: Any) -> float:
    """Sum up as `megatron.core.optimizer.clip_grads.get_grad_norm_fp32` does."""
    device = torch.cuda.current_device()
    total = torch.zeros(1, dtype=torch.float32, device=device)
    if norms:
        together = torch.norm(torch.stack(norms).cpu())
        total = torch.tensor([float(together)], dtype=torch.float32, device=device) ** 2.0
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return float(total.item() ** 0.5)


def _check_for_nan(part: Any, inner: MainParameterOptimizer) -> bool:
    """Look for infinities and NaNs in gradients as they are, and let them be unscaled as they are read."""
    gradients = [g for p in _parameters(inner) if (g := inner.gradient_of(p)) is not None]
    part.found_inf.fill_(0.0)
    if gradients:
        one = torch.ones((), dtype=torch.float32, device=part.found_inf.device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, part.found_inf, one)
    dist.all_reduce(part.found_inf, op=dist.ReduceOp.MAX, group=part.get_grad_stats_parallel_group())
    inner.inverse_scale = part.grad_scaler.inv_scale
    return bool(part.found_inf.item() > 0)


def _parameters(inner: MainParameterOptimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in inner.param_groups for parameter in group["params"])


def _lend_gradients(inner: MainParameterOptimizer) -> None:
    for parameter in _parameters(inner):
        gradient = getattr(parameter, "main_grad", None)
        parameter.decoupled_grad = parameter.grad if gradient is None else gradient  # type: ignore[attr-defined]


def _zero_grad(part: Any, set_to_none: bool = True) -> None:
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.decoupled_grad = None
            if parameter.grad is not None and set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def _forget(part: Any, inner: MainParameterOptimizer, state_dict: Any = None) -> None:
    """Start from the model's parameters again, or from the more exact ones of a checkpoint."""
    if state_dict is None:
        for parameter in _parameters(inner):
            inner.forget_main_parameter(parameter)
        return
    assert _sharded(part), "Initialize main params from state dict is not supported"
    exact = part._build_model_param_to_state_dict_param_map(state_dict)
    for models, shards in zip(part.model_float16_groups, part.shard_float16_groups):
        for model, shard in zip(models, shards):
            held = part._get_model_param_range_map(model)["param"]
            inner.take_main_parameter(shard, exact[model].view(-1)[held.start : held.end])


def _state(part: Any, inner: MainParameterOptimizer, is_loading: bool = False) -> dict[str, Any]:
    """Return the state in the form that megatron-core gives it with float32 copies."""
    if is_loading:
        inner.allocate()
    state: dict[str, Any] = {"optimizer": inner.state_dict()}
    if part.grad_scaler:
        state["grad_scaler"] = part.grad_scaler.state_dict()
    state["fp32_from_fp16_params"] = [
        [inner.main_parameter(parameter) for parameter in group] for group in part.float16_groups
    ]
    return state


def _load_state(part: Any, inner: MainParameterOptimizer, state: dict[str, Any]) -> None:
    key = next(name for name in ("fp32_from_fp16_params", "fp32_from_fp16") if name in state)
    # megatron-core's own method copies into as many float32 parameters as there are: here none.
    kept, part.fp32_from_float16_groups = part.fp32_from_float16_groups, []
    try:
        type(part).load_state_dict(part, state)
    finally:
        part.fp32_from_float16_groups = kept
    for parameters, saved in zip(part.float16_groups, state[key]):
        for parameter, value in zip(parameters, saved):
            inner.take_main_parameter(parameter, value)

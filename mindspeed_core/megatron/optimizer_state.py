"""megatron-core's optimizers as part of a checkpoint: exact after a load, also with torch's Adam.

Without Transformer Engine or Apex the inner optimizer is torch's Adam, whose per-parameter ``step`` tensors
megatron-core's distributed optimizer loads wrongly in several ways, some silently. Each is put right here, on
the instance that is loaded; nothing of megatron-core is patched.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mindspeed_core.megatron import optimizer_chain
from mindspeed_core.megatron.fully_sharded import optimizer_state
from mindspeed_core.megatron.fully_sharded.torch_fsdp2 import as_part_of

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


def sharded_state(
    optimizer: MegatronOptimizer,
    model_state: Mapping[str, Any],
    metadata: Mapping[str, Any],
    *,
    is_loading: bool,
) -> Any:
    """Return the optimizer's sharded state: to save, or as the template of a load.

    Collective over the data-parallel group of each inner optimizer.

    Args:
        optimizer: the optimizer.
        model_state: sharded state of the unwrapped chunks, built from the parameters themselves.
        metadata: how the state is laid out (``distrib_optim_sharding_type``, ``dp_cp_group``, …).
        is_loading: build a template.
    """
    for inner in _inner(optimizer):
        _allocate(inner)
        if optimizer_state.is_megatron_sharded(inner):
            return optimizer_state.sharded_state(inner, metadata, is_loading=is_loading)
        if isinstance(inner, DistributedOptimizer) and _is_torch_adam(inner):
            _serve_ranks_without_parameters(inner)
    return optimizer.sharded_state_dict(dict(model_state), is_loading=is_loading, metadata=dict(metadata))


def load_state(optimizer: MegatronOptimizer, state: Any) -> None:
    """Load what a template of `sharded_state` was filled with."""
    found = _inner(optimizer)
    if found and optimizer_state.is_megatron_sharded(found[0]):
        optimizer_state.load_state(found[0], state)
        return
    if found:
        state = optimizer_chain.fitted(state, found)
    adams = [inner for inner in found if _is_torch_adam(inner)]
    if adams:
        _name_the_step_of_an_unused_optimizer(state)
    for inner, part in _parts(optimizer, state):
        _keep_main_parameters_sharded(inner, part)
    for inner in adams:
        if isinstance(inner, DistributedOptimizer):
            inner._set_main_param_and_optimizer_states = MethodType(_set_states_except_step, inner)
    try:
        optimizer.load_state_dict(state)
    finally:
        for inner in adams:
            vars(inner).pop("_set_main_param_and_optimizer_states", None)
            vars(inner).pop("state_dict", None)
    for inner in adams:
        _give_each_parameter_its_step(inner)
    for inner in _inner(optimizer):
        _keep_moments_sharded(inner)


def forget_overrides(optimizer: MegatronOptimizer) -> None:
    """Take back what `sharded_state` set on the instances."""
    for inner in _inner(optimizer):
        vars(inner).pop("state_dict", None)


def _inner(optimizer: MegatronOptimizer) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if not getattr(inner, "is_stub_optimizer", False)]


def _is_torch_adam(inner: Any) -> bool:
    return isinstance(inner.optimizer, (torch.optim.Adam, torch.optim.AdamW))


def _parameters(inner: Any) -> list[torch.Tensor]:
    return [parameter for group in inner.optimizer.param_groups for parameter in group["params"]]


def _allocate(inner: Any) -> None:
    """Give an optimizer that has not stepped yet its state, so that there is something to save or to fill."""
    if inner.init_state_fn is None:
        return
    inner.init_state_fn(inner.optimizer, inner.config)
    if _is_torch_adam(inner):
        for parameter in _parameters(inner):
            state = inner.optimizer.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)


def _serve_ranks_without_parameters(inner: Any) -> None:
    """Let a rank whose shard holds no parameter describe the optimizer too.

    ``DistributedOptimizer.state_dict`` insists on exactly one ``step`` among the parameters of this rank.
    """
    own = [float(state["step"]) for state in inner.optimizer.state.values() if "step" in state]
    step = torch.tensor([max(own, default=0.0)], dtype=torch.float32, device=_device())
    dist.all_reduce(step, op=dist.ReduceOp.MAX, group=inner.data_parallel_group)
    if own:
        return
    common = step.item()

    def state_dict(self: Any) -> dict[str, Any]:
        described = self.optimizer.state_dict()
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "step": common}
            for group in described["param_groups"]
        ]
        result: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if self.grad_scaler:
            result["grad_scaler"] = self.grad_scaler.state_dict()
        return result

    inner.state_dict = MethodType(state_dict, inner)


def _device() -> torch.device | int:
    return torch.cuda.current_device()


@torch.no_grad()
def _set_states_except_step(
    self: Any, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Copy a parameter's loaded state into place.

    Differs from megatron-core's: the state may lack ``step`` (the loader strips it), the parameter may be a
    leaf that requires grad, and a ``step`` among the tensors is the template's, not the file's.
    """
    group_index, group_order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group_index]["params"][group_order]
    targets = {"param": main_param, **self.optimizer.state[main_param]}
    for key, target in targets.items():
        if key != "step" and key in tensors:
            target.copy_(tensors[key])


def _parts(optimizer: MegatronOptimizer, state: Any) -> list[tuple[Any, Any]]:
    """Each inner optimizer with its part of the state."""
    found = _inner(optimizer)
    return list(zip(found, (state[index] for index in range(len(found))) if 0 in state else [state]))


def _keep_main_parameters_sharded(inner: Any, state: Any) -> None:
    """Loaded float32 parameters are parts where the parameters of the run are."""
    groups = getattr(inner, "fp32_from_float16_groups", ())
    key = "fp32_from_fp16_params"
    if groups and key in state:
        state[key] = [
            [as_part_of(own, loaded) for own, loaded in zip(group, saved)]
            for group, saved in zip(groups, state[key])
        ]


def _keep_moments_sharded(inner: Any) -> None:
    """Loaded moments are parts where their parameters are."""
    for parameter in _parameters(inner):
        state = inner.optimizer.state.get(parameter, {})
        for name, value in state.items():
            state[name] = as_part_of(parameter, value)


def _name_the_step_of_an_unused_optimizer(state: Any) -> None:
    """Say step 0 where megatron-core leaves it out, which Adam does not accept."""
    parts = [state[key] for key in state] if isinstance(state, dict) and 0 in state else [state]
    for part in parts:
        inner = part if "state" in part else part.get("optimizer", {})
        if "state" in inner:
            inner["state"].setdefault("common_step", torch.zeros((), dtype=torch.float32))


def _give_each_parameter_its_step(inner: Any) -> None:
    """Set every parameter's ``step`` to the saved one, each in a tensor of its own.

    After a load all parameters share one tensor, and Adam counts it up once per parameter.
    """
    for group in inner.optimizer.param_groups:
        saved = group.pop("step", None) if isinstance(inner, DistributedOptimizer) else None
        for parameter in group["params"]:
            state = inner.optimizer.state[parameter]
            step = state.get("step", 0.0) if saved is None else saved
            state["step"] = torch.as_tensor(step, dtype=torch.float32).detach().clone()

"""megatron-core's optimizers as part of a checkpoint: exact after a load, also with torch's Adam.

Without Transformer Engine or Apex the inner optimizer is torch's Adam, whose per-parameter ``step`` tensors
megatron-core's distributed optimizer loads wrongly in several ways, some silently. Each is put right here, on
the instance that is loaded, for every optimizer that keeps such tensors; nothing of megatron-core is patched.
An optimizer that describes its state itself needs none of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import optimizer as optimizer_module
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron import distributed_state, optimizer_chain
from mindspeed_megatron.described_optimizer import MOMENTS, DescribedOptimizer, local_part
from mindspeed_megatron.fully_sharded import optimizer_state
from mindspeed_megatron.fully_sharded.torch_fsdp2 import as_part_of

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

logger = logging.getLogger("mindspeed_core")


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

    Raises:
        CheckpointError: an inner optimizer is of a kind that megatron-core cannot save.
    """
    for inner in _inner(optimizer):
        _allocate(inner)
        if optimizer_state.is_megatron_sharded(inner):
            return optimizer_state.sharded_state(inner, metadata, is_loading=is_loading)
        if isinstance(inner, DistributedOptimizer):
            if _counts_steps(inner):
                _serve_ranks_without_parameters(inner)
            elif not HAVE_APEX_OR_TE and not isinstance(inner.optimizer, DescribedOptimizer):
                raise CheckpointError(
                    f"--use-distributed-optimizer does not save the state of "
                    f"{type(inner.optimizer).__name__}; derive it from mindspeed_core.DescribedOptimizer and "
                    "let mindspeed_core.put_inside put it in place"
                )
            if not is_loading and metadata.get("distrib_optim_sharding_type") == distributed_state.FORMAT:
                _describe_in_place(inner, model_state)
    # A template is made of a state that the optimizer loads from itself.
    with groups_told_apart(optimizer) if is_loading else nullcontext():
        return optimizer.sharded_state_dict(dict(model_state), is_loading=is_loading, metadata=dict(metadata))


def load_state(optimizer: MegatronOptimizer, state: Any) -> None:
    """Load what a template of `sharded_state` was filled with."""
    found = _inner(optimizer)
    if found and optimizer_state.is_megatron_sharded(found[0]):
        optimizer_state.load_state(found[0], state)
        _warn_of_moments_that_were_not_saved(found[0])
        return
    with groups_told_apart(optimizer, state):
        _load_parts(optimizer, found, optimizer_chain.fitted(state, found) if found else state)


def _load_parts(optimizer: MegatronOptimizer, found: list[Any], state: Any) -> None:
    counting = [inner for inner in found if _counts_steps(inner)]
    if counting:
        _name_the_step_of_an_unused_optimizer(state)
    for inner, part in _parts(optimizer, state):
        _keep_main_parameters_sharded(inner, part)
        _begin_a_loss_scale_that_was_not_saved(inner, part)
    for inner in counting:
        if isinstance(inner, DistributedOptimizer):
            inner._set_main_param_and_optimizer_states = MethodType(_set_states_except_step, inner)
    try:
        optimizer.load_state_dict(state)
    finally:
        for inner in counting:
            vars(inner).pop("_set_main_param_and_optimizer_states", None)
            vars(inner).pop("state_dict", None)
    for inner in counting:
        _give_each_parameter_its_step(inner)
    for inner in found:
        if not isinstance(inner.optimizer, DescribedOptimizer):
            _keep_moments_sharded(inner)
        _warn_of_moments_that_were_not_saved(inner)


@contextmanager
def groups_told_apart(optimizer: MegatronOptimizer, state: Any = None) -> Iterator[None]:
    """Let megatron-core find the groups of ``--decoupled-lr`` again in this block, and those of other rates.

    Since 0.16 the entries by which it looks for a saved group are the same for them and for others. Since
    0.19 rates and weight decays are among these entries, so that a run with others would find none: its
    groups take those of the saved ones, which a load gives them anyway.

    Args:
        optimizer: the optimizer.
        state: what it loads, where that does not come from itself.
    """
    found = [inner.optimizer for inner in _inner(optimizer) if hasattr(inner, "optimizer")]
    saved = optimizer_chain.saved_groups(state) if isinstance(state, Mapping) else []
    live = [group for inner in found for group in inner.param_groups]
    before = [group.get("is_decoupled_lr") for group in live]
    for group in (*live, *saved):
        if "default_config" in group:
            group["is_decoupled_lr"] = not group["default_config"]
    _take_saved_rates(live, saved)
    try:
        yield
    finally:
        for group, mark in zip((group for inner in found for group in inner.param_groups), before):
            if mark is not None:
                group["is_decoupled_lr"] = mark


def _take_saved_rates(live: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Give each group the rates of the saved group that holds its parameters."""
    kinds = optimizer_chain.IDENTIFIERS
    structure = (*kinds, "is_expert_parallel")
    rates = [key for key in optimizer_module.param_group_identifier_keys if key not in structure]
    for group in live if rates else ():
        alike = [other for other in saved if all(other.get(key) == group.get(key) for key in kinds)]
        # Under another layout experts may have been in one group with the others.
        alike.sort(key=lambda other: other.get(structure[-1]) != group.get(structure[-1]))
        if alike:
            for key in rates:
                group.pop(key, None)
            group.update({key: alike[0][key] for key in rates if key in alike[0]})


def without_absent(optimizer: MegatronOptimizer, state: Any, held: Collection[str]) -> Any:
    """Return a template of `sharded_state` without what an optimizer keeps beyond moments and a file lacks.

    Args:
        optimizer: the optimizer.
        state: the template.
        held: the keys of tensors in the checkpoint.
    """
    further = {
        name
        for inner in _inner(optimizer)
        if isinstance(inner.optimizer, DescribedOptimizer)
        for name in inner.optimizer.further
        if not any(key.startswith(f"optimizer.state.{name}.") for key in held)
    }
    return _without(state, further) if further else state


def _without(state: Any, names: Collection[str]) -> Any:
    if not isinstance(state, dict):
        return state
    return {key: _without(value, names) for key, value in state.items() if key not in names}


def needs_care(optimizer: MegatronOptimizer) -> bool:
    """Return whether megatron-core alone does not save and load an optimizer exactly."""
    return any(
        _counts_steps(inner) or isinstance(inner.optimizer, DescribedOptimizer) for inner in _inner(optimizer)
    )


def forget_overrides(optimizer: MegatronOptimizer) -> None:
    """Take back what `sharded_state` set on the instances."""
    for inner in _inner(optimizer):
        if isinstance(inner, DistributedOptimizer):
            vars(inner).pop("state_dict", None)
            vars(inner).pop("sharded_state_dict", None)


def _inner(optimizer: MegatronOptimizer) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if not getattr(inner, "is_stub_optimizer", False)]


def _counts_steps(inner: Any) -> bool:
    """Return whether an optimizer keeps a ``step`` per parameter, as torch's Adam does."""
    if isinstance(inner.optimizer, DescribedOptimizer):
        return False
    if isinstance(inner.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        # Also before its first step, and where this rank's part of the parameters is empty.
        return True
    return any("step" in state for state in inner.optimizer.state.values())


def _parameters(inner: Any) -> list[torch.Tensor]:
    return [parameter for group in inner.optimizer.param_groups for parameter in group["params"]]


def _allocate(inner: Any) -> None:
    """Give an optimizer that has not stepped yet its state, so that there is something to save or to fill."""
    if inner.init_state_fn is None:
        return
    inner.init_state_fn(inner.optimizer, inner.config)
    if _counts_steps(inner):
        for parameter in _parameters(inner):
            state = inner.optimizer.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)


def _serve_ranks_without_parameters(inner: Any) -> None:
    """Let a rank whose shard holds no parameter describe the optimizer too.

    ``DistributedOptimizer.state_dict`` insists on exactly one ``step`` among the parameters of this rank.
    """
    own = [float(state["step"]) for state in inner.optimizer.state.values() if "step" in state]
    if own and distributed_state.every_rank_holds_parameters(inner):
        return
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


def _describe_in_place(inner: Any, model_state: Mapping[str, Any]) -> None:
    """Let an optimizer describe its state where it lies, instead of gathering it on every rank."""
    pieces = distributed_state.held_pieces(inner, model_state)
    if pieces is not None:
        inner.sharded_state_dict = lambda *given, **named: {
            **inner.state_dict(),
            "param_state": pieces,
            "param_state_sharding_type": distributed_state.FORMAT,
        }


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


def _begin_a_loss_scale_that_was_not_saved(inner: Any, state: Any) -> None:
    """Let a dynamic loss scale start anew after a constant one, of which a checkpoint holds nothing."""
    if isinstance(getattr(inner, "grad_scaler", None), DynamicGradScaler) and state.get("grad_scaler") == {}:
        del state["grad_scaler"]
        if dist.get_rank() == 0:
            logger.warning(
                "the checkpoint was written with a constant loss scale; the dynamic one starts anew"
            )


def _keep_moments_sharded(inner: Any) -> None:
    """Loaded moments are parts where their parameters are."""
    for parameter in _parameters(inner):
        state = inner.optimizer.state.get(parameter, {})
        for name, value in state.items():
            state[name] = as_part_of(parameter, value)


def _warn_of_moments_that_were_not_saved(inner: Any) -> None:
    """Say on rank 0 that a moment starts from zeros in the midst of a training.

    An optimizer may have kept both moments of some parameters, and one of others.
    """
    holders = [*inner.optimizer.state.values(), *inner.optimizer.param_groups]
    count = max((int(holder["step"]) for holder in holders if "step" in holder), default=0)
    if count == 0 or dist.get_rank() != 0:
        return
    found = [_moments(inner, parameter) for parameter in _parameters(inner) if parameter.numel()]
    filled = [{name for name, tensor in moments.items() if tensor.any()} for moments in found]
    for name in MOMENTS:
        held = [names for names, moments in zip(filled, found) if name in moments]
        lacking = [names for names in held if name not in names]
        # All of both may be zero in a parameter that has had no gradient.
        if lacking and (len(lacking) == len(held) or any(lacking)):
            logger.warning(
                "the optimizer that wrote the checkpoint kept no %s%s: after %d updates %s starts it from "
                "zeros, and its next updates are of another size; --no-load-optim starts all of its state "
                "anew",
                name,
                ""
                if len(lacking) == len(held)
                else f" of {sum(map(bool, lacking))} of {len(held)} parameters",
                count,
                type(inner.optimizer).__name__,
            )


def _moments(inner: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the moments of a parameter that an optimizer has, as this rank has them."""
    if isinstance(inner.optimizer, DescribedOptimizer):
        state = inner.optimizer.kept(parameter)
    else:
        state = inner.optimizer.state.get(parameter, {})
    return {name: local_part(state[name]) for name in MOMENTS if name in state}


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
        saved = group.pop("step", None)
        saved = saved if isinstance(inner, DistributedOptimizer) else None
        for parameter in group["params"]:
            state = inner.optimizer.state[parameter]
            step = state.get("step", 0.0) if saved is None else saved
            state["step"] = torch.as_tensor(step, dtype=torch.float32).detach().clone()

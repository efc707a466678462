"""The state of features in checkpoints, under the keys that the stage `checkpoint_state` documents.

State that is shaped like the parameters (averages, moments of a second optimizer, adapters) is described by
the layout of the parameters themselves, so that every other layout loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from torch.distributed.tensor import DTensor

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.fully_sharded.parts import described, with_data
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.run import Run


def feature_parts(run: Run) -> dict[str, Any]:
    """Return every active feature's own state by name, its shards under keys of their own.

    Raises:
        CheckpointError: two features contribute under one name.
    """
    parts: dict[str, Any] = {}
    for contributed in run.session.collect("checkpoint_state", run=run):
        for name, part in contributed.items():
            if name in parts:
                raise CheckpointError(f"two features contribute checkpoint state under the name {name!r}")
            parts[name] = _map_leaves(part, partial(_with_prefix, f"features.{name}."))
            _check_keys(name, parts[name])
    return parts


def like_parameters(
    run: Run, tensors: Mapping[torch.nn.Parameter, torch.Tensor], prefix: str = ""
) -> dict[str, Any]:
    """Describe tensors that are shaped like parameters, for `checkpoint_state`; any layout loads them.

    A feature that keeps a tensor per parameter, ``{parameter: tensor}``, saves and restores it so::

        @hookimpl
        def checkpoint_state(self, run):
            return {self.name: like_parameters(run, self._average)}

        @hookimpl
        def restore_checkpoint_state(self, run, state):
            if self.name in state:
                restore_like_parameters(run, self._average, state[self.name])

    Collective where the model's ``sharded_state_dict`` is; every rank calls it.

    Args:
        run: the run in progress.
        tensors: by parameter of ``run.model``, of all of them or of some (the same of the whole model on
            every rank), each in the shape of its parameter and in any dtype. Where data parallelism shards a
            parameter, its tensor is a ``DTensor`` cut alike, or this rank's part; where Megatron-FSDP
            replicates it, whole.
        prefix: begins the keys; several descriptions of one feature have different ones.

    Returns:
        Descriptions by a name of the parameter, as `restore_like_parameters` expects them back.

    Raises:
        CheckpointError: a tensor has no parameter in the model or another shape than it, or the module of
            its parameter does not describe it.
    """
    return {name: _with_prefix(prefix, entry) for name, _, entry in _entries(run, tensors)}


@torch.no_grad()
def restore_like_parameters(
    run: Run, tensors: Mapping[torch.nn.Parameter, torch.Tensor], state: Mapping[str, Any]
) -> None:
    """Copy what was loaded into the tensors that `like_parameters` described.

    Args:
        run: the run in progress.
        tensors: as there; they are written in place.
        state: the description, filled.

    Raises:
        CheckpointError: ``state`` lacks one of the tensors, or holds it in another shape.
    """
    for name, tensor, _ in _entries(run, tensors):
        if name not in state:
            raise CheckpointError(f"the loaded state holds nothing for {name}")
        loaded = state[name]
        if not isinstance(loaded, torch.Tensor):
            # This rank holds no part of the parameter.
            continue
        local = _local(tensor)
        if loaded.numel() != local.numel():
            raise CheckpointError(f"{name}: {list(loaded.shape)} was loaded for {list(local.shape)}")
        local.copy_(loaded.reshape(local.shape))


def _entries(
    run: Run, tensors: Mapping[torch.nn.Parameter, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Yield every tensor with a name and its description."""
    given = {id(parameter): tensor for parameter, tensor in tensors.items()}
    metadata = {
        "singleton_local_shards": False,
        # One key per layer: state may belong to some layers only.
        "non_homogeneous_layers": True,
        "dp_cp_group": run.pg.dp_cp,
    }
    unknown = dict(given)
    missing = []
    for index, wrapped in enumerate(run.model):
        model = unwrap(wrapped)
        in_parts = bool(getattr(getattr(wrapped, "ddp_config", None), "use_megatron_fsdp", False))
        if in_parts:
            wrapped.module._replace_param_with_distributed_if_needed()
            state = described(model, partial(_of_part, given), metadata=metadata)
        else:
            state = model.sharded_state_dict(metadata=metadata)
        for name, parameter in model.named_parameters():
            key = next((key for key in _identities(parameter) if key in given), None)
            if key is None:
                continue
            unknown.pop(key, None)
            tensor = given[key]
            if name not in state:
                missing.append(name)
                continue
            entry = state[name] if in_parts else _described(name, parameter, tensor, state[name])
            yield f"{index}.{name}", tensor, entry
    if missing:
        raise CheckpointError(
            f"{', '.join(missing[:5])}: not in the model's sharded_state_dict, so their state cannot be "
            "saved; describe them in the sharded_state_dict of their module"
        )
    if unknown:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in list(unknown.values())[:5])
        raise CheckpointError(
            f"{len(unknown)} of {len(given)} tensors (of shape {shapes}) belong to no parameter of "
            "run.model; use the parameters of the run as keys"
        )


def _described(name: str, parameter: Any, tensor: torch.Tensor, entry: Any) -> Any:
    own, local = _local(parameter), _local(tensor)
    _check_shape(name, own, local)
    if not isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
        raise CheckpointError(f"{name}: its module describes it as a {type(entry).__name__}, not as a tensor")
    if entry.data.data_ptr() != own.data_ptr() or entry.data.shape != own.shape:
        raise CheckpointError(
            f"{name}: its module's sharded_state_dict describes another tensor than the parameter, "
            "and state cannot be brought into that one's form"
        )
    return with_data(entry, local)


def _of_part(given: Mapping[int, torch.Tensor], part: Any) -> torch.Tensor | None:
    tensor = next((given[key] for key in _identities(part) if key in given), None)
    if tensor is None:
        return None
    local = _local(tensor)
    if local.shape != part.orig_param.shape:
        _check_shape("a part of a parameter", part._local_tensor, local)
    return local


def _identities(parameter: Any) -> list[int]:
    """Return what a parameter is found by; Megatron-FSDP holds it as a whole or as a part by turns."""
    return [id(each) for each in (parameter, getattr(parameter, "orig_param", None)) if each is not None]


def _with_prefix(prefix: str, leaf: Any) -> Any:
    if isinstance(leaf, (ShardedBase, ShardedTensorFactory)) and hasattr(leaf, "key"):
        # A copy: the feature may hand out the same description again.
        return replace(leaf, key=prefix + leaf.key)
    return leaf


def _map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _map_leaves(item, function) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_leaves(item, function) for item in value]
    return function(value)


def _local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.detach()


def _check_shape(name: str, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    if parameter.shape != tensor.shape:
        raise CheckpointError(
            f"{name}: state of shape {list(tensor.shape)} for a parameter of shape {list(parameter.shape)} "
            "on this rank; like_parameters describes tensors in the shape of their parameters"
        )


def _check_keys(feature: str, part: Any) -> None:
    seen: set[tuple[Any, ...]] = set()

    def look(leaf: Any) -> None:
        if isinstance(leaf, ShardedTensor):
            place = (leaf.key, leaf.global_offset, leaf.flattened_range)
            if place in seen:
                raise CheckpointError(
                    f"feature {feature}: two tensors of its state have the key {leaf.key!r}; give "
                    "like_parameters another prefix for each description"
                )
            seen.add(place)

    _map_leaves(part, look)

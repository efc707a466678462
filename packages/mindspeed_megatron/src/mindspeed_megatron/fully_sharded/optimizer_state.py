"""The optimizer's state under Megatron-FSDP, as part of checkpoints that the distributed optimizer reads too.

megatron-core has a format of its own for it. Here every moment is described like the part of the parameter it
belongs to, under the keys of the distributed optimizer's ``fully_reshardable`` state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.described_optimizer import MOMENTS, DescribedOptimizer, local_part
from mindspeed_megatron.fully_sharded.parts import described, take
from mindspeed_megatron.optimizer_chain import matching, saved_groups
from mindspeed_megatron.unwrap import unwrap

_FORMAT = "fully_reshardable"
_MAIN = "param"
_OURS = ("params", "step", "is_expert_parallel")
"""Keys of a parameter group that do not come from a checkpoint."""


def is_megatron_sharded(inner: Any) -> bool:
    """Return whether an optimizer updates the parts of Megatron-FSDP."""
    return isinstance(inner, DistributedOptimizer) and bool(inner.ddp_config.use_megatron_fsdp)


def sharded_state(inner: Any, metadata: Mapping[str, Any], *, is_loading: bool) -> dict[str, Any]:
    """Return the optimizer's sharded state, to save or as the template of a load. Collective.

    Args:
        inner: an optimizer whose state exists.
        metadata: how the state is laid out, see ``layout_metadata``.
        is_loading: build a template.

    Raises:
        CheckpointError: the checkpoint has the state in a form that other layouts cannot read.
    """
    found = metadata.get("distrib_optim_sharding_type", _FORMAT)
    if found != _FORMAT:
        raise CheckpointError(
            f"the checkpoint holds the optimizer's state as {found}, which only the layout that wrote it "
            "reads; --no-load-optim resumes without"
        )
    step = _common_step(inner)
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "step": step}
        for group in inner.optimizer.param_groups
    ]
    return {
        "optimizer": {"param_groups": groups},
        "param_state": {
            index: {name: _chunk_state(inner, chunk, name, metadata, is_loading) for name in _names(inner)}
            for index, chunk in enumerate(inner.model_chunks)
        },
        "param_state_sharding_type": _FORMAT,
    }


def load_state(inner: Any, state: Mapping[str, Any]) -> None:
    """Load what a template of `sharded_state` was filled with.

    Raises:
        CheckpointError: the checkpoint's groups of parameters are others.
    """
    step = _load_groups(inner, saved_groups(state))
    for index, chunk in enumerate(inner.model_chunks):
        chunk.hold_parts()
        parts = dict(unwrap(chunk).named_parameters())
        described: dict[str, dict[str, torch.Tensor]] = {}
        for name, loaded in state["param_state"][index].items():
            for key, tensor in loaded.items():
                part = parts.get(key)
                if name != _MAIN and isinstance(inner.optimizer, DescribedOptimizer):
                    if isinstance(tensor, torch.Tensor):
                        described.setdefault(key, {})[name] = tensor
                    continue
                target = None if part is None else _tensor(inner, name)(part)
                if target is not None:
                    take(target, tensor)
        for key, tensors in described.items():
            inner.optimizer.take(parts[key], tensors)
        for part in parts.values():
            if "step" in inner.optimizer.state[part]:
                inner.optimizer.state[part]["step"] = torch.tensor(float(step), dtype=torch.float32)
        chunk.take_over_parts()


def _names(inner: Any) -> tuple[str, ...]:
    """Return the names of the float32 parameters and of their state."""
    own = inner.optimizer
    return (_MAIN, *(own.names if isinstance(own, DescribedOptimizer) else MOMENTS))


def _tensor(inner: Any, name: str) -> Callable[[Any], Any]:
    if name == _MAIN:
        return lambda part: part
    if isinstance(inner.optimizer, DescribedOptimizer):
        return lambda part: inner.optimizer.described(part)[name] if part in inner.optimizer.state else None
    return lambda part: inner.optimizer.state[part].get(name) if part in inner.optimizer.state else None


def _chunk_state(
    inner: Any, chunk: Any, name: str, metadata: Mapping[str, Any], is_loading: bool
) -> dict[str, Any]:
    chunk.hold_parts()
    model, tensor = unwrap(chunk), _tensor(inner, name)

    def value(part: Any) -> torch.Tensor | None:
        found = tensor(part)
        if found is None:
            return None
        held = local_part(found)
        # What is loaded must not lie in the parameters, which the model's own state is copied into first.
        return torch.empty_like(held) if is_loading else held

    held = dict(model.named_parameters())
    state = described(model, value, metadata=dict(metadata))
    return {key: _renamed(entry, name) for key, entry in state.items() if key in held}


def _renamed(entry: Any, name: str) -> Any:
    if isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
        return replace(entry, key=f"optimizer.state.{name}.{entry.key}")
    return entry


def _common_step(inner: Any) -> float:
    """Return how often Adam has stepped; a rank that holds no part learns it from the others."""
    holders = [*inner.optimizer.state.values(), *inner.optimizer.param_groups]
    steps = [float(holder["step"]) for holder in holders if "step" in holder]
    step = torch.tensor([max(steps, default=0.0)], device=torch.cuda.current_device())
    if dist.get_world_size() > 1:
        dist.all_reduce(step, op=dist.ReduceOp.MAX)
    return float(step.item())


def _load_groups(inner: Any, saved: list[dict[str, Any]]) -> float:
    step = 0.0
    fused = any("step" in group for group in inner.optimizer.param_groups)
    for group in inner.optimizer.param_groups:
        found = matching(saved, group)
        step = max(step, float(found.get("step") or 0.0))
        if isinstance(inner.optimizer, DescribedOptimizer):
            inner.optimizer.take_group(group, found)
            continue
        group.update({key: value for key, value in found.items() if key not in _OURS})
        if fused:
            group["step"] = int(step)
    return step

"""One unsharded state for every layout: parameters and gradients by logical name, as full tensors.

megatron-core's ``sharded_state_dict`` describes where each local tensor sits in its global one, for tensor,
pipeline, expert and data parallelism and for split activations alike. Gathering by that description makes two
layouts comparable tensor by tensor, and scattering by it lets every layout start from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    from mindspeed_core.run import Run


class CanonicalError(RuntimeError):
    """A state does not fit together: elements missing or covered twice, names or shapes that differ."""


@dataclass(frozen=True)
class CanonicalState:
    """A model's tensors without any parallelism, on the CPU.

    Attributes:
        tensors: full tensors by logical key; vocabulary padding is cut off.
        replica_error: for keys with several copies, the largest ``max|copy - first| / (max|first| + 1e-12)``;
            copies of a parameter that drifted apart between ranks show here.
    """

    tensors: Mapping[str, torch.Tensor]
    replica_error: Mapping[str, float] = field(default_factory=dict)

    def drifted(self, tolerance: float = 0.0) -> dict[str, float]:
        """Return the keys whose copies differ by more than ``tolerance``."""
        return {key: error for key, error in self.replica_error.items() if not error <= tolerance}


def canonical_parameters(run: Run) -> CanonicalState | None:
    """Gather the parameters; collective over all ranks, the result exists on rank 0 and is None elsewhere.

    Features with a layout of their own take part through the stages ``before_save_checkpoint`` and
    ``after_load_checkpoint``, which bring parameters into their canonical form and back.
    """
    run.complete_parameters()
    run.session.call("before_save_checkpoint", run=run)
    try:
        return gather_entries(run, _entries(run))
    finally:
        run.session.call("after_load_checkpoint", run=run)


def canonical_gradients(run: Run) -> CanonicalState | None:
    """Gather the finished gradients; collective, the result exists on rank 0 and is None elsewhere.

    Call it between the last reduction of a step and the update (in a wrapper of ``optimizer_step``, before
    its ``yield``). Under the distributed optimizer each rank holds only its shard of the reduced gradients:
    the shards of every bucket are gathered first. A loss scale is divided out. A parameter whose gradient
    lives somewhere else carries ``canonical_grad``, a function that returns it in the parameter's shape.
    """
    gradients = _complete_gradients(run)
    with _standing_in(run, gradients):
        return gather_entries(run, _entries(run))


def load_canonical(run: Run, state: CanonicalState, *, may_lack: Sequence[str] = ()) -> None:
    """Give every rank its part of ``state`` and refresh the optimizer's own copies of the parameters.

    Args:
        run: the run; it may lack an optimizer.
        state: what `canonical_parameters` returned, present on every rank.
        may_lack: patterns of parameters that keep their value where the state lacks them.

    Raises:
        CanonicalError: names of tensors the state lacks, or whose shape does not fit.
    """
    missing: list[str] = []

    def part(entry: Any) -> torch.Tensor:
        full = state.tensors.get(entry.key)
        if full is None and matches(entry.key, may_lack):
            own: torch.Tensor = entry.data.detach().clone()
            return own
        if full is None:
            missing.append(entry.key)
            return torch.zeros(entry.local_shape)
        return _slice(full, entry)

    for chunk in _bare_chunks(run):
        loaded = _loaded(_describe(run, chunk), part)
        if missing:
            raise CanonicalError(
                f"the state to load lacks {', '.join(sorted(set(missing))[:5])}; it has {len(state.tensors)} "
                f"tensors, for instance {', '.join(sorted(state.tensors)[:3])}. Parameters that a proof's "
                "baseline lacks are named in its extra_parameters"
            )
        absent, _ = chunk.load_state_dict(loaded, strict=False)
        unset = [name for name in absent if not name.endswith("_extra_state") and name in dict(_named(chunk))]
        if unset:
            raise CanonicalError(f"{', '.join(unset[:5])}: not part of the model's sharded_state_dict")
    run.session.call("after_load_checkpoint", run=run)
    if run.optimizer is not None:
        run.optimizer.reload_model_params()


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Return whether a key fits one of the patterns, with the wildcards of file names."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def bare_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model chunk inside wrappers for data parallelism and mixed precision."""
    while isinstance(inner := getattr(module, "module", None), torch.nn.Module):
        module = inner
    return module


def _bare_chunks(run: Run) -> list[Any]:
    return [bare_module(chunk) for chunk in run.model]


def _named(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return chunk.named_parameters(remove_duplicate=False)


def _describe(run: Run, chunk: Any) -> dict[str, Any]:
    metadata = {
        "singleton_local_shards": False,
        # One key per layer, whatever the layers look like: reports name the layer, and a model in which a
        # feature changed only some layers keeps its names.
        "non_homogeneous_layers": True,
        "dp_cp_group": run.pg.dp_cp,
    }
    described: dict[str, Any] = chunk.sharded_state_dict(metadata=metadata)
    return described


def _entries(run: Run) -> list[Any]:
    """Return every ``ShardedTensor`` of this rank."""
    return [entry for chunk in _bare_chunks(run) for entry in sharded_tensors(_describe(run, chunk))]


def sharded_tensors(described: Any) -> Iterator[Any]:
    """Yield every ``ShardedTensor`` of a sharded state dict, factories built."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for leaf in tree_iter(described):
        if isinstance(leaf, ShardedTensor):
            yield leaf
        elif isinstance(leaf, ShardedTensorFactory):
            yield from sharded_tensors(leaf.build())


def _loaded(value: Any, part: Callable[[Any], torch.Tensor]) -> Any:
    """Return the counterpart of one entry of a sharded state dict, with tensors in place of descriptions."""
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory

    if isinstance(value, ShardedTensor):
        return part(value)
    if isinstance(value, ShardedTensorFactory):
        return value.merge_fn(_loaded(value.build(), part))
    if isinstance(value, Mapping):
        return {name: _loaded(item, part) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_loaded(item, part) for item in value]
    return value.data if isinstance(value, ShardedBase) else value


def _vocabulary(run: Run) -> int:
    """Return the rows of embedding and output weights that stand for tokens; 0 where unknown."""
    return int(getattr(run.args, "vocab_size", None) or 0)


def _slice(full: torch.Tensor, entry: Any) -> torch.Tensor:
    """Cut this rank's part out of a full tensor; rows beyond it (vocabulary padding) are zero."""
    shape = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
    if full.dim() != len(shape):
        raise CanonicalError(f"{entry.key}: {tuple(full.shape)} does not fit {tuple(entry.global_shape)}")
    padded = entry.allow_shape_mismatch and full.shape[0] < entry.global_shape[0]
    if tuple(full.shape[padded:]) != tuple(entry.global_shape[padded:]):
        raise CanonicalError(
            f"{entry.key}: the state has shape {tuple(full.shape)}, this model {tuple(entry.global_shape)}"
        )
    region = full[tuple(slice(o, o + n) for o, n in zip(entry.global_offset, shape))]
    if tuple(region.shape) != shape:
        whole = full.new_zeros(shape)
        whole[: region.shape[0]] = region
        region = whole
    return region.reshape(tuple(entry.local_shape)).clone()


def gather_entries(run: Run, entries: Iterable[Any]) -> CanonicalState | None:
    """Put the ``ShardedTensor`` of all ranks together; collective, None on ranks other than 0."""
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    local = []
    for entry in entries:
        tensor = entry.data.detach().to("cpu", copy=True)
        shape = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
        local.append(
            (
                entry.key,
                tuple(entry.global_shape),
                tuple(entry.global_offset),
                tensor.reshape(shape),
                is_main_replica(entry.replica_id),
                bool(entry.allow_shape_mismatch),
            )
        )
    parts: list[Any] = [local]
    if dist.is_initialized() and dist.get_world_size() > 1:
        here = dist.get_rank() == 0
        gathered: list[Any] | None = [None] * dist.get_world_size() if here else None
        dist.gather_object(local, gathered, dst=0)
        if gathered is None:
            return None
        parts = gathered
    # What puts copies together is the host's own: no device and no instrument follows it.
    with _disable_current_modes():
        return _paste(parts, _vocabulary(run))


def _paste(parts: list[Any], vocabulary: int) -> CanonicalState:
    tensors: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    copies: list[tuple[str, tuple[slice, ...], torch.Tensor]] = []
    padded: set[str] = set()
    for part in parts:
        for key, shape, offset, tensor, main, mismatch in part:
            if key not in tensors:
                tensors[key] = torch.zeros(shape, dtype=tensor.dtype)
                covered[key] = torch.zeros(shape, dtype=torch.int32)
            if tuple(tensors[key].shape) != shape:
                raise CanonicalError(
                    f"{key}: ranks disagree on its shape, {tuple(tensors[key].shape)} and {shape}"
                )
            region = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape))
            if main:
                tensors[key][region] = tensor
                covered[key][region] += 1
            else:
                copies.append((key, region, tensor))
            if mismatch:
                padded.add(key)
    for key, count in covered.items():
        if not bool((count == 1).all()):
            lost, twice = int((count == 0).sum()), int((count > 1).sum())
            raise CanonicalError(
                f"{key}: of {count.numel()} elements {lost} are on no rank and {twice} on several as the "
                "main copy; the module's sharded_state_dict does not describe its layout"
            )
    errors: dict[str, float] = {}
    for key, region, tensor in copies:
        first = tensors[key][region]
        error = 0.0
        if tensor.numel():
            # In doubles: the smallest float16 is larger than what keeps zeros from being divided by zero.
            error = float((tensor - first).abs().max()) / (float(first.abs().max()) + 1e-12)
        # A NaN in a copy must not read as agreement.
        errors[key] = max(errors.get(key, 0.0), error if error == error else float("inf"))
    if vocabulary:
        for key in padded:
            tensors[key] = tensors[key][:vocabulary].clone()
    return CanonicalState(tensors, errors)


def _complete_gradients(run: Run) -> dict[int, torch.Tensor]:
    """Return the reduced gradient of every parameter of this rank, by ``id`` of the parameter."""
    found: dict[int, torch.Tensor] = {}
    for chunk in run.model:
        kinds = ("bucket_groups", "expert_parallel_bucket_groups")
        for group in (group for kind in kinds for group in getattr(chunk, kind, ())):
            if not group.ddp_config.use_distributed_optimizer:
                continue
            for bucket in group.buckets:
                found.update(_gathered_bucket(bucket, group.intra_distributed_optimizer_instance_group))
    scale = float(run.optimizer.get_loss_scale()) if run.optimizer is not None else 1.0
    for chunk in _bare_chunks(run):
        for _, parameter in _named(chunk):
            own = getattr(parameter, "canonical_grad", None)
            gradient = own() if own is not None else found.get(id(parameter))
            if gradient is None:
                gradient = getattr(parameter, "main_grad", None)
            if gradient is None:
                gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            found[id(parameter)] = gradient.detach() / scale if scale != 1.0 else gradient.detach()
    return found


def _gathered_bucket(bucket: Any, group: dist.ProcessGroup) -> dict[int, torch.Tensor]:
    data = bucket.grad_data
    size = group.size()
    whole = data
    if size > 1:
        length = data.numel() // size
        shard = data[group.rank() * length : (group.rank() + 1) * length].clone()
        whole = torch.empty_like(data)
        dist.all_gather_into_tensor(whole, shard, group=group)
    found = {}
    for parameter in bucket.params_list:
        # Parameters start at padded offsets: the view's address says where, the bucket's index does not.
        start = (parameter.main_grad.data_ptr() - data.data_ptr()) // data.element_size()
        found[id(parameter)] = whole[start : start + parameter.numel()].view(parameter.shape)
    return found


@contextmanager
def _standing_in(run: Run, values: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Put other values in the places of the parameters, so that the model describes their layout too.

    The parameters themselves stay untouched: exchanging their ``data`` would drop the hooks on which gradient
    accumulation hangs.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    stand_ins: dict[int, torch.nn.Parameter] = {}
    try:
        for chunk in _bare_chunks(run):
            for module in chunk.modules():
                for name, parameter in module._parameters.items():
                    if parameter is None:
                        continue
                    if id(parameter) not in stand_ins:
                        stand_in = torch.nn.Parameter(values[id(parameter)], requires_grad=False)
                        stand_in.__dict__.update(parameter.__dict__)
                        stand_ins[id(parameter)] = stand_in
                    replaced.append((module._parameters, name, parameter))
                    module._parameters[name] = stand_ins[id(parameter)]
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter

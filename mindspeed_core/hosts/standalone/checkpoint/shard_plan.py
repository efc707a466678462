"""Which rank writes which shard into which file: planned once per layout, and used until the layout changes.

megatron-core and torch plan a save in several exchanges among all ranks. Nothing of that changes from save to
save of one training, except where the set of tensors does: a feature that adds state, an optimizer that is
built later, experts that move. So the plan remembers the exact description it was made for.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.filesystem_async import _split_by_size_and_type
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mindspeed_core.hosts.standalone.checkpoint.collective import on_all_ranks, on_first_rank
from mindspeed_core.hosts.standalone.checkpoint.shard_files import ShardFile

FILES_PER_RANK = 2

Layout = tuple[tuple[Any, ...], ...]
"""The description of every shard of a rank, without data."""


@dataclass(frozen=True)
class ShardPlan:
    """The plan of one rank.

    Attributes:
        layout: the shards it was made for.
        files: name of each file, and its items with the places of their data among the shards.
        index: torch's description of the whole checkpoint; on rank 0 alone.
    """

    layout: Layout
    files: tuple[tuple[str, tuple[tuple[WriteItem, tuple[int, ...]], ...]], ...]
    index: Metadata | None

    def tensors(self, shards: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that this rank writes, in the order of the plan."""
        return [
            shards[places[0]].data
            for _, items in self.files
            for item, places in items
            if item.type != WriteItemType.BYTE_IO
        ]

    def fill(self, shards: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[ShardFile]:
        """Return the files with their content.

        Args:
            shards: of this save.
            tensors: `tensors`, or copies of them in host memory.
        """
        source = iter(tensors)
        files = []
        for name, items in self.files:
            content: list[tuple[WriteItem, torch.Tensor | io.BytesIO]] = []
            for item, places in items:
                if item.type == WriteItemType.BYTE_IO:
                    data = io.BytesIO()
                    torch.save([shards[place].data for place in places], data)
                    content.append((item, data))
                else:
                    assert item.tensor_data is not None
                    content.append((item, next(source).detach().reshape(item.tensor_data.chunk.sizes)))
            files.append(ShardFile(name, content))
        return files

    def write_index(self, directory: Path, results: list[list[WriteResult]]) -> None:
        """Write torch's index of all ranks' files. On rank 0."""
        assert self.index is not None
        FileSystemWriter(directory).finish(replace(self.index), results)


def layout_of(shards: Sequence[Any]) -> Layout:
    """Describe shards by everything that planning depends on."""
    return tuple(_description(shard) for shard in shards)


def _description(shard: Any) -> tuple[Any, ...]:
    if isinstance(shard, ShardedTensor):
        data = shard.data
        return (
            shard.key,
            shard.dtype,
            None if data is None else (data.dtype, tuple(data.shape), data.device.type),
            tuple(shard.local_shape),
            tuple(shard.global_shape),
            tuple(shard.global_offset),
            shard.axis_fragmentations,
            shard.replica_id,
            shard.prepend_axis_num,
            shard.allow_shape_mismatch,
        )
    return (shard.unique_key, shard.replica_id)


def make_plan(
    what: str, sharded: Any, common: Mapping[str, Any], layout: Layout, group: dist.ProcessGroup
) -> ShardPlan:
    """Plan a save. Collective.

    Args:
        what: begins the message of an error.
        sharded: the sharded part of the state. Replicas are assigned in it.
        common: the part that all ranks hold alike.
        layout: `layout_of` its shards.
        group: the ranks that share the writing of what they hold alike.

    Raises:
        CheckpointError: the shards of all ranks do not make up whole tensors.
    """

    def check(state: Mapping[str, Any] | None = None) -> None:
        validate_sharding_integrity(determine_global_metadata(sharded)[1], common_state_dict=state)

    on_all_ranks(what, lambda: check(dict(common)))
    shards = list(nested_values(sharded))
    if group.size() > 1:
        distribution = determine_main_replica_uniform_distribution(sharded, group)
        distribute_main_replicas_with_precomputed_distribution(sharded, group, distribution)
        on_all_ranks(what, check)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    files, plan = on_all_ranks(what, lambda: _plan_of_rank(planner, sharded, shards))
    everyones: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(plan, everyones)
    found: list[Metadata] = []

    def plan_all() -> None:
        assert everyones is not None
        found.append(planner.create_global_plan(everyones)[1])

    on_first_rank(what, plan_all)
    return ShardPlan(layout, files, found[0] if found else None)


def _plan_of_rank(planner: MCoreSavePlanner, sharded: Any, shards: Sequence[Any]) -> tuple[Any, SavePlan]:
    by_key, *_ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    numbers = {id(shard): number for number, shard in enumerate(shards)}
    places: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for key, held in by_key.items():
        if isinstance(held[0], ShardedObject):
            places[key, None] = tuple(numbers[id(shard)] for shard in held)
        else:
            places.update({(key, tuple(shard.global_offset)): (numbers[id(shard)],) for shard in held})
    planner.set_up_planner(mcore_to_pyt_state_dict(by_key, False), is_coordinator=dist.get_rank() == 0)
    plan = planner.create_local_plan()
    files: list[tuple[str, tuple[tuple[WriteItem, tuple[int, ...]], ...]]] = []
    for items in _split_by_size_and_type(FILES_PER_RANK, plan.items):
        if items:
            named = tuple((item, places[_place(item)]) for item in items)
            files.append((f"__{dist.get_rank()}_{len(files)}.distcp", named))
    return tuple(files), plan


def _place(item: WriteItem) -> tuple[Any, ...]:
    offset = item.index.offset
    return item.index.fqn, None if offset is None else tuple(offset)

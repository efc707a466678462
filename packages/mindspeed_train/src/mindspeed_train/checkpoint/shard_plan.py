"""Assignment of shards to ranks and files: planned once per layout, and used until the layout changes.

megatron-core and torch plan a save in several exchanges among all ranks. Nothing of that changes from save to
save of one training, except where the set of tensors does: a feature that adds state, an optimizer that is
built later, experts that move. So the plan remembers the exact description it was made for.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
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
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mindspeed_train.checkpoint import index as checkpoint_index
from mindspeed_train.checkpoint.collective import on_all_ranks, on_first_rank
from mindspeed_train.checkpoint.shard_files import Piece, ShardFile, length_of
from mindspeed_train.checkpoint.tensor_archive import around

FILES_PER_RANK = 2

Layout = tuple[tuple[Any, ...], ...]
"""The description of every shard of a rank, without data."""


@dataclass(frozen=True)
class _Item:
    """An item of a file: the places of its data among the shards, and what surrounds it if it is a tensor."""

    planned: WriteItem
    places: tuple[int, ...]
    before: bytes = b""
    after: tuple[Piece, ...] = ()

    @property
    def is_tensor(self) -> bool:
        return self.planned.type != WriteItemType.BYTE_IO


@dataclass(frozen=True)
class ShardPlan:
    """The plan of one rank.

    Attributes:
        layout: the shards it was made for.
        files: name and items of each file.
        index: torch's description of the whole checkpoint; on rank 0 alone.
    """

    layout: Layout
    files: tuple[tuple[str, tuple[_Item, ...]], ...]
    index: Metadata | None

    def tensors(self, shards: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors that this rank writes, in the order of the plan."""
        return [shards[item.places[0]].data for _, items in self.files for item in items if item.is_tensor]

    def fill(self, shards: Sequence[Any], tensors: Sequence[Piece]) -> list[ShardFile]:
        """Return the files with their content.

        Args:
            shards: of this save.
            tensors: the bytes of `tensors`, or where they lie in shared memory.
        """
        source = iter(tensors)
        return [
            ShardFile(
                name,
                [
                    (item.before, next(source), *item.after)
                    if item.is_tensor
                    else (_serialized([shards[place].data for place in item.places]),)
                    for item in items
                ],
            )
            for name, items in self.files
        ]

    def results(self, files: Sequence[ShardFile]) -> list[WriteResult]:
        """Say where torch finds each item of filled files again."""
        found = []
        for (name, items), file in zip(self.files, files):
            offset = 0
            for item, pieces in zip(items, file.items):
                length = length_of(pieces)
                where = _StorageInfo(name, offset, length)
                found.append(WriteResult(item.planned.index, length, where))
                offset += length
        return found

    def write_index(self, directory: Path, results: list[list[WriteResult]]) -> None:
        """Write the index of all ranks' files: as data, and as torch and Megatron-LM read it. On rank 0."""
        assert self.index is not None
        text = checkpoint_index.describe(_as_data(self.index, [found for each in results for found in each]))
        (directory / checkpoint_index.NAME).write_text(text)
        FileSystemWriter(directory).finish(replace(self.index), results)


def _as_data(metadata: Metadata, results: Sequence[WriteResult]) -> checkpoint_index.Index:
    """Return torch's index and places as an index of our own."""
    places = {
        (
            found.index.fqn,
            None if found.index.offset is None else tuple(found.index.offset),
        ): checkpoint_index.Place(
            found.storage_data.relative_path, found.storage_data.offset, found.storage_data.length
        )
        for found in results
    }
    tensors, objects = {}, {}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            objects[key] = places[key, None]
            continue
        chunks = [
            checkpoint_index.Chunk(tuple(c.offsets), tuple(c.sizes), places[key, tuple(c.offsets)])
            for c in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[key] = checkpoint_index.TensorEntry(dtype, tuple(entry.size), tuple(chunks))
    nested = "nd_reformulated_orig_global_shape"
    shapes = {
        key: tuple(data[nested])
        for key, data in (getattr(metadata, "mcore_data", None) or {}).items()
        if data.get(nested) is not None
    }
    return checkpoint_index.Index(tensors, objects, shapes)


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
    doing: str, sharded: Any, common: Mapping[str, Any], layout: Layout, group: dist.ProcessGroup
) -> ShardPlan:
    """Plan a save. Collective.

    Args:
        doing: begins the message of an error.
        sharded: the sharded part of the state. Replicas are assigned in it.
        common: the part that all ranks hold alike.
        layout: `layout_of` its shards.
        group: the ranks that share the writing of what they hold alike.

    Raises:
        CheckpointError: the shards of all ranks do not make up whole tensors.
    """

    def check(state: Mapping[str, Any] | None = None) -> None:
        validate_sharding_integrity(determine_global_metadata(sharded)[1], common_state_dict=state)

    on_all_ranks(doing, lambda: check(dict(common)))
    shards = list(nested_values(sharded))
    if group.size() > 1:
        distribution = determine_main_replica_uniform_distribution(sharded, group)
        distribute_main_replicas_with_precomputed_distribution(sharded, group, distribution)
        on_all_ranks(doing, check)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    files, plan = on_all_ranks(doing, lambda: _plan_of_rank(planner, sharded, shards))
    everyones: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(plan, everyones)
    found: list[Metadata] = []

    def plan_all() -> None:
        assert everyones is not None
        found.append(planner.create_global_plan(everyones)[1])

    on_first_rank(doing, plan_all)
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
    files: list[tuple[str, tuple[_Item, ...]]] = []
    for items in _split_by_size_and_type(FILES_PER_RANK, plan.items):
        if items:
            named = tuple(_item(item, places[_place(item)]) for item in items)
            files.append((f"__{dist.get_rank()}_{len(files)}.distcp", named))
    return tuple(files), plan


def _item(planned: WriteItem, places: tuple[int, ...]) -> _Item:
    data = planned.tensor_data
    if data is None:
        return _Item(planned, places)
    return _Item(planned, places, *around(data.chunk.sizes, data.properties.dtype))


def _place(item: WriteItem) -> tuple[Any, ...]:
    offset = item.index.offset
    return item.index.fqn, None if offset is None else tuple(offset)


def _serialized(objects: list[Any]) -> bytes:
    # Most are the extra state of layers that have none.
    return (
        _serialized_nothing(len(objects))
        if not any(each is not None for each in objects)
        else _saved(objects)
    )


@cache
def _serialized_nothing(count: int) -> bytes:
    return _saved([None] * count)


def _saved(objects: list[Any]) -> bytes:
    content = io.BytesIO()
    torch.save(objects, content)
    return content.getvalue()

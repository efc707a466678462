"""A digest of the weights under adapters: the same in every layout, another one for any other weights.

Each element counts as its bits in bfloat16 times a number made of its place in the whole tensor; ranks add
their parts up in 64-bit integers, which wrap around. Zeros count nothing, so that padded rows of a vocabulary
do not change it, and float32 and bfloat16 copies of one base have the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica

from mindspeed_core.errors import UserError
from mindspeed_megatron.unwrap import unwrap
from mindspeed_models.lora.trained import trained_names

if TYPE_CHECKING:
    from mindspeed_core.run import Run

_FIRST, _SECOND = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D
"""Odd multipliers of linear congruential generators."""
_AT_ONCE = 1 << 22
"""Elements whose numbers exist at a time."""


@torch.no_grad()
def base_digest(run: Run) -> str:
    """Return the digest of all weights that are not trained; collective over all ranks."""
    device = run.dist.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for chunk in run.model:
        trained = trained_names(chunk)
        described = unwrap(chunk).sharded_state_dict(
            metadata={
                "singleton_local_shards": False,
                "non_homogeneous_layers": True,
                "dp_cp_group": run.pg.dp_cp,
            }
        )
        frozen = {name: entry for name, entry in described.items() if name not in trained}
        for entry in _tensors(frozen):
            if is_main_replica(entry.replica_id):
                total += _digest_of(entry).to(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return f"{int(total) & (2**64 - 1):016x}"


def digest_of_whole(key: str, tensor: torch.Tensor, expert: int | None = None, experts: int = 0) -> int:
    """Return the share of one whole tensor, as `base_digest` adds it up; for files.

    Args:
        key: of the tensor in checkpoints.
        tensor: its values.
        expert: which of the experts it belongs to, that are one tensor in checkpoints; None for no expert.
        experts: how many there are.
    """
    if expert is None:
        return int(_digest_of(ShardedTensor.from_rank_offsets(key, tensor)))
    place = (0, expert, experts)
    return int(_digest_of(ShardedTensor.from_rank_offsets(key, tensor, place, prepend_axis_num=1)))


def _tensors(described: Mapping[str, Any]) -> Iterable[ShardedTensor]:
    waiting: list[Any] = list(described.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, ShardedTensorFactory):
            waiting.append(value.build())
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value


def _digest_of(entry: ShardedTensor) -> torch.Tensor:
    data: torch.Tensor = entry.data.detach()
    if not data.is_floating_point():
        raise UserError(f"{entry.key}: {data.dtype} weights have no digest; adapters need a base of floats")
    key = int.from_bytes(hashlib.sha256(entry.key.encode()).digest()[:7], "big") | 1
    shape, offset = tuple(entry.global_shape), tuple(entry.global_offset)
    local = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
    # The first axis' length is not used: rows that padding adds leave the others where they are.
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    rows = data.reshape(local[0], -1) if local else data.reshape(1, 1)
    place = torch.zeros((), dtype=torch.int64, device=data.device)
    for axis in range(1, len(shape)):
        along = (torch.arange(local[axis], device=data.device) + offset[axis]) * strides[axis]
        place = place.unsqueeze(-1) + along
    place = place.reshape(-1) if len(shape) > 1 else place.reshape(1)
    first = offset[0] if offset else 0
    width = strides[0] if strides else 1
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    step = max(1, _AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        bits = part.to(torch.bfloat16).contiguous().view(torch.int16).to(torch.int64)
        numbers = torch.arange(start, start + part.shape[0], device=data.device) + first
        where = (numbers * width).unsqueeze(-1) + place
        total += (bits * _mixed(where, key)).sum()
    return total


def _mixed(where: torch.Tensor, key: int) -> torch.Tensor:
    """Return an odd-looking 64-bit number for each place; products wrap around."""
    mixed = (where + 1) * _signed(_FIRST * key)
    mixed = (mixed ^ (mixed >> 31)) * _signed(_SECOND)
    return mixed ^ (mixed >> 29)


def _signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number

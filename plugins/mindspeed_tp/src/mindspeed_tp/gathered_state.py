"""State of a distributed optimizer gathered, and handed out again, in slices over the group of the device.

megatron-core gathers a whole bucket at a time, and hands state out over gloo alone. Here a slice of every
rank's shard travels at a time, over the data-parallel group itself, so that no group of gloo is needed and
the device holds a few slices instead of a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from mindspeed_core.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from mindspeed_core.session import Session

OWNER = "hccl-replace-gloo"
KEYS = ("param", "exp_avg", "exp_avg_sq")
"""Names of the tensors that the format keeps for a parameter."""


def slices(local: int, size: int) -> int:
    """Return how many collectives move one tensor of a bucket.

    Args:
        local: elements of a rank's shard of the bucket.
        size: elements of a slice.
    """
    return math.ceil(local / size)


@dataclass(frozen=True)
class _Bucket:
    """One bucket of a buffer of gradients.

    Attributes:
        places: of each parameter in this rank's shard.
        start: first element in the buffer without padding.
        size: elements without padding.
        local: elements of each rank's shard, with padding.
    """

    places: Mapping[Any, tuple[int, int]]
    start: int
    size: int
    local: int


@dataclass(frozen=True)
class SlicedState:
    """Gathers and hands out the state of one optimizer.

    Attributes:
        optimizer: megatron-core's.
        size: elements of a slice.
    """

    optimizer: Any
    size: int

    @torch.no_grad()
    def gather(self, *, empty_data: bool = False, return_on_all_ranks: bool = False) -> dict[Any, Any] | None:
        """Return the state of all ranks in the form of megatron-core's ``get_parameter_state_dp_zero``.

        Args:
            empty_data: make the tensors without gathering, for a load.
            return_on_all_ranks: on each data-parallel rank instead of the first alone.

        Returns:
            float32 tensors on the host, by buffer and dtype; None on other ranks.
        """
        group = self.optimizer.data_parallel_group
        keeps = return_on_all_ranks or group.rank() == 0
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, dtype, buckets, whole in self._buffers():
            world: dict[str, Any] = {key: torch.zeros(whole) for key in KEYS} if keeps else {}
            for bucket in () if empty_data else buckets:
                for key, shard in self._shards(bucket).items():
                    self._gather(shard, bucket, world.get(key), return_on_all_ranks)
            state[number] = {dtype: {**world, "numel_unpadded": whole} if keeps else {}}
        return state if keeps else None

    @torch.no_grad()
    def hand_out(self, state: Mapping[Any, Any] | None) -> None:
        """Give each rank its part of what `gather` returned on the first one.

        Args:
            state: on the first data-parallel rank.

        Raises:
            CheckpointError: another model's.
        """
        first = self.optimizer.data_parallel_group.rank() == 0
        if first:
            self.optimizer.split_state_dict_if_needed(state)
        for number, dtype, buckets, whole in self._buffers():
            held = state[number][dtype] if first and state is not None else None
            if held is not None and held["numel_unpadded"] != whole:
                raise CheckpointError(
                    f"the optimizer's buffer {number} has {whole} elements, the checkpoint "
                    f"{held['numel_unpadded']}; load it with the layout that saved it"
                )
            for bucket in buckets:
                shards = {key: self._scatter(bucket, None if held is None else held[key]) for key in KEYS}
                for parameter, (start, stop) in bucket.places.items():
                    found = {key: shard[start:stop] for key, shard in shards.items()}
                    # What an optimizer keeps besides, such as the number of a step, stays.
                    held_here = self.optimizer._get_main_param_and_optimizer_states(parameter)
                    self.optimizer._set_main_param_and_optimizer_states(parameter, {**held_here, **found})

    def _buffers(self) -> Iterator[tuple[int, Any, Sequence[_Bucket], int]]:
        ranks = self.optimizer.data_parallel_group.size()
        for number, maps in enumerate(self.optimizer.gbuf_ranges):
            buffer = self.optimizer.buffers[number]
            for dtype, bucket_maps in maps.items():
                buckets, start = [], 0
                for bucket, held in zip(buffer.buckets, bucket_maps, strict=True):
                    places = {
                        parameter: (ranges["gbuf_local"].start, ranges["gbuf_local"].end)
                        for parameter, ranges in held["param_map"].items()
                    }
                    size, padded = bucket.numel_unpadded, bucket.grad_data.numel()
                    buckets.append(_Bucket(places, start, size, padded // ranks))
                    start += size
                yield number, dtype, buckets, buffer.numel_unpadded

    def _shards(self, bucket: _Bucket) -> dict[str, Tensor]:
        shards = {key: torch.zeros(bucket.local) for key in KEYS}
        for parameter, (start, stop) in bucket.places.items():
            tensors = self.optimizer._get_main_param_and_optimizer_states(parameter)
            for key, shard in shards.items():
                shard[start:stop].copy_(tensors[key].detach().reshape(-1))
        return shards

    def _gather(self, shard: Tensor, bucket: _Bucket, world: Tensor | None, everywhere: bool) -> None:
        group, device = self.optimizer.data_parallel_group, torch.cuda.current_device()
        first = dist.get_global_rank(group, 0)
        for offset in range(0, bucket.local, self.size):
            sent = shard[offset : offset + self.size].to(device)
            received = None if world is None else [torch.empty_like(sent) for _ in range(group.size())]
            if everywhere:
                dist.all_gather(received, sent, group=group)
            else:
                dist.gather(sent, received, first, group=group)
            for rank, piece in enumerate(received or ()):
                assert world is not None
                begin = rank * bucket.local + offset
                # Padding is at the end of a bucket.
                length = max(0, min(piece.numel(), bucket.size - begin))
                world[bucket.start + begin : bucket.start + begin + length].copy_(piece[:length])

    def _scatter(self, bucket: _Bucket, world: Tensor | None) -> Tensor:
        group, device = self.optimizer.data_parallel_group, torch.cuda.current_device()
        first = dist.get_global_rank(group, 0)
        padded = None
        if world is not None:
            padded = torch.zeros(bucket.local * group.size())
            padded[: bucket.size].copy_(world[bucket.start : bucket.start + bucket.size])
        shard = torch.empty(bucket.local)
        for offset in range(0, bucket.local, self.size):
            length = min(self.size, bucket.local - offset)
            received = torch.empty(length, device=device)
            sent = None
            if padded is not None:
                begins = (rank * bucket.local + offset for rank in range(group.size()))
                sent = [padded[begin : begin + length].to(device) for begin in begins]
            dist.scatter(received, sent, first, group=group)
            shard[offset : offset + length].copy_(received)
        return shard


def check_without_gloo() -> None:
    """Refuse groups of gloo where there should be none.

    Raises:
        UserError: the program has made them.
    """
    try:
        parallel_state.get_data_parallel_group_gloo()
    except AssertionError:
        return
    raise UserError(
        "--disable-gloo-process-groups, but this program has made groups of gloo; call "
        "initialize_model_parallel with create_gloo_process_groups=False and get_megatron_optimizer with "
        "use_gloo_process_groups=False, or drop the flag"
    )


def gather_in_slices(session: Session, optimizer: Any, size: int) -> None:
    """Let the distributed optimizers of a run gather and hand out their state in slices.

    Args:
        session: records the changes.
        optimizer: of the run.
        size: elements of a slice.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        # Optimizers that keep more than two moments bring a way of their own.
        if not isinstance(part, DistributedOptimizer) or "get_parameter_state_dp_zero" in vars(part):
            continue
        state = SlicedState(part, size)

        def gather(
            _: Any,
            use_gloo_comm: bool = False,
            empty_data: bool = False,
            return_on_all_ranks: bool = False,
            *,
            state: SlicedState = state,
        ) -> Any:
            return state.gather(empty_data=empty_data, return_on_all_ranks=return_on_all_ranks)

        def hand_out(
            _: Any, gathered: Any, *, update_legacy_format: bool = False, state: SlicedState = state
        ) -> None:
            if update_legacy_format:
                raise UserError(
                    "--ckpt-convert-update-legacy-dist-opt-format reads a format of before February 2024 "
                    "over gloo; convert it without --disable-gloo-process-groups and --hccl-slice-size"
                )
            state.hand_out(gathered)

        session.instances.set(OWNER, part, "get_parameter_state_dp_zero", MethodType(gather, part))
        session.instances.set(OWNER, part, "load_parameter_state_from_dp_zero", MethodType(hand_out, part))

"""A dispatcher of equally many places for every expert: exchanges of equal parts, sizes known beforehand.

Rows travel as ``[E, C, h]``. The router's weights stay with the tokens and multiply the results that come
back, so that a layer exchanges once in each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from mindspeed_moe.capacity_rows import Places, from_places, places_of, to_places
from mindspeed_moe.dispatchers import LaunchedAllToAllDispatcher
from mindspeed_moe.gshard import capacity_of
from mindspeed_moe.launch_wait import AllToAll

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

T = TypeVar("T")

STEP = 128
"""Capacities without drops are multiples of this, so that few sizes of buffers occur."""


class CapacityDispatcher(LaunchedAllToAllDispatcher):
    """Tokens take places of experts; each rank gets the places of its experts from every rank."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        factor: float | None,
        multiple: int = 1,
    ) -> None:
        """Build megatron-core's dispatcher.

        Args:
            num_local_experts: of this rank.
            local_expert_indices: their numbers.
            config: of the model.
            pg_collection: the groups.
            factor: of the capacity; None for as many places as the fullest expert needs on any rank.
            multiple: the capacity is rounded up to a multiple of it.
        """
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        self._factor, self._multiple = factor, multiple

    def launch_dispatch(
        self,
        hidden: Tensor,
        routing_map: Tensor,
        probs: Tensor,
        create: Callable[[], T],
        *,
        create_last: bool = False,
    ) -> T:
        """Launch the exchange of rows to the experts; see `LaunchedAllToAllDispatcher`."""
        rows = self._take_places(hidden, routing_map, probs)
        equal = [self._places_of_rank()] * self.ep_size
        self._there = AllToAll("dispatch", self.ep_group, equal, equal)
        self._back = AllToAll("combine", self.ep_group, equal, equal)
        self._rows = self._there.launch(rows)
        return create()

    def wait_dispatch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows ``[m, h]`` sorted by local expert, their numbers ``[E]`` and ones ``[m]``."""
        rows = self._there.wait(self._rows)
        del self._rows
        if self.tp_size > 1:
            rows = gather_from_sequence_parallel_region(rows, group=self.tp_group)
        rows = self._swapped(rows, self.tp_size * self.ep_size, self.num_local_experts)
        each = rows.shape[0] // self.num_local_experts
        numbers = torch.full((self.num_local_experts,), each, dtype=torch.long)
        return rows, numbers, rows.new_ones(rows.shape[0])

    def launch_combine(self, results: Tensor) -> None:
        """Launch the exchange of the experts' results ``[m, h]`` back to their tokens."""
        rows = self._swapped(results, self.num_local_experts, self.tp_size * self.ep_size)
        if self.tp_size > 1:
            rows = reduce_scatter_to_sequence_parallel_region(rows, group=self.tp_group)
        self._results = self._back.launch(rows)

    def wait_combine(self) -> Tensor:
        """Return the weighted sums of each token's results, ``[s, b, h]``."""
        rows = self._back.wait(self._results)
        del self._results
        return self._leave_places(rows)

    def _take_places(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
        """Return rows ``[E C, h]`` of ``[s, b, h]``."""
        self.hidden_shape = hidden.shape
        self._capacity = self._capacity_of(routing_map)
        self._places: Places = places_of(routing_map, self._capacity, self.config.moe_router_topk)
        self._weights = probs.gather(1, self._places.experts)
        return to_places(hidden.reshape(-1, hidden.shape[-1]), self._places)

    def _leave_places(self, rows: Tensor) -> Tensor:
        """Return sums ``[s, b, h]`` of ``[E C, h]``."""
        return from_places(rows, self._weights, self._places).view(self.hidden_shape)

    def _places_of_rank(self) -> int:
        """Return the places of one rank's experts for the tokens of another one."""
        return self._capacity * self.num_local_experts

    def _capacity_of(self, routing_map: Tensor) -> int:
        tokens, experts = routing_map.shape
        if self._factor is not None:
            capacity, step = capacity_of(tokens, experts, self.config.moe_router_topk, self._factor), 1
        else:
            most = routing_map.sum(0).max().view(1)
            if (ranks := self.tp_ep_group.size()) > 1:
                # All ranks that exchange rows have as many places. A dry run knows what a gather returns.
                of_all = most.new_empty(ranks)
                dist.all_gather_into_tensor(of_all, most, group=self.tp_ep_group)
                most = of_all.max()
            capacity, step = max(int(most), 1), STEP
        for of in (step, self._multiple):
            capacity = -(-capacity // of) * of
        return capacity

    def _swapped(self, rows: Tensor, first: int, second: int) -> Tensor:
        """Return rows ``[first, second, C, h]`` as ``[second, first, C, h]``, flat both times."""
        if first == 1 or second == 1:
            return rows
        parts = rows.view(first, second, self._capacity, rows.shape[-1])
        return parts.transpose(0, 1).reshape(rows.shape)

"""Experts that are computed while the rows of the next one travel, and their dispatchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from mindspeed_kernels.modules.grouped_experts import GroupedExperts
from mindspeed_megatron.experts import PlainExperts
from mindspeed_moe.capacity_dispatcher import CapacityDispatcher
from mindspeed_moe.chunked import Item, pipelined, pipelined_apart
from mindspeed_moe.dispatchers import LaunchedAllToAllDispatcher
from mindspeed_moe.launch_wait import AllGather, AllToAll, Exchange, GatherRows, ReduceRows, ReduceScatter

T = TypeVar("T")

Compute = Callable[[int, Tensor], Tensor]
"""Returns the results ``[m, h]`` of a local expert for its rows ``[m, h]``."""
Run = Callable[[Compute], list[Tensor]]
"""Runs the items of a layer; returns their results where their tokens are."""


class PipelinedDispatcher(CapacityDispatcher):
    """Places of experts travel by local expert and slice, each by an exchange of its own.

    What it hands to the experts is the pipeline itself: they are computed inside their own call, which is
    where their parameters are complete. Where experts are cut over ranks, rows of an item are gathered from
    those ranks after the exchange, and sums of its results scattered to them before it.
    """

    def __init__(self, *args: Any, apart: bool = False, **options: Any) -> None:
        """Build a `CapacityDispatcher`; ``apart`` keeps exchanges and gathers from running together."""
        super().__init__(*args, **options)
        self._apart = apart

    def launch_dispatch(
        self,
        hidden: Tensor,
        routing_map: Tensor,
        probs: Tensor,
        create: Callable[[], T],
        *,
        create_last: bool = False,
    ) -> T:
        """Cut the rows into items; see `LaunchedAllToAllDispatcher`."""
        rows = self._take_places(hidden, routing_map, probs)
        slices = self._multiple
        each = self._capacity // slices
        parts = rows.view(self.ep_size, self.num_local_experts, slices, each, -1)
        # One copy for all items, and one for their gradients.
        parts = parts.permute(1, 2, 0, 3, 4).reshape(-1, self.ep_size * each, rows.shape[-1])
        self._items = [
            Item(number // slices, part, *self._exchanges(number, [each] * self.ep_size))
            for number, part in enumerate(parts.unbind())
        ]
        return create()

    def _exchanges(self, number: int, equal: list[int]) -> tuple[list[Exchange], list[Exchange]]:
        """Return the exchanges of an item, there and back."""
        there: list[Exchange] = [AllToAll(f"dispatch {number}", self.ep_group, equal, equal)]
        back: list[Exchange] = [AllToAll(f"combine {number}", self.ep_group, equal, equal)]
        if self.tp_size > 1:
            there.append(AllGather(f"gather {number}", self.tp_group))
            back.insert(0, ReduceScatter(f"scatter {number}", self.tp_group))
        return there, back

    def wait_dispatch(self) -> Any:
        """Return the pipeline, for the experts."""
        items = self._items
        # This object may live until backward, the rows need not.
        del self._items

        # Experts that no tensor parallelism cuts have one exchange, and nothing to keep apart.
        order = pipelined_apart if self._apart and self.tp_size > 1 else pipelined
        return (lambda compute: order(items, compute),)

    def launch_combine(self, results: Any) -> None:
        """Take over the results of the items, which are back already."""
        self._parts: list[Tensor] = results

    def wait_combine(self) -> Tensor:
        """Return the weighted sums of each token's results, ``[s, b, h]``."""
        parts = torch.stack(self._parts)
        del self._parts
        each = self._capacity // self._multiple
        parts = parts.view(self.num_local_experts, self._multiple, self.ep_size, each, -1)
        return self._leave_places(parts.permute(2, 0, 1, 3, 4).reshape(-1, parts.shape[-1]))


class PipelinedRowsDispatcher(LaunchedAllToAllDispatcher):
    """Rows travel by local expert, as many as there are, each expert's by an exchange of its own.

    The router's weights stay with the tokens and multiply the results that come back. Where experts are cut
    over ranks, unequally many rows of an item are gathered from those ranks.
    """

    def __init__(self, *args: Any, apart: bool = False, **options: Any) -> None:
        """Build megatron-core's dispatcher; ``apart`` keeps exchanges and gathers from running together."""
        super().__init__(*args, **options)
        self._apart = apart

    def launch_dispatch(
        self,
        hidden: Tensor,
        routing_map: Tensor,
        probs: Tensor,
        create: Callable[[], T],
        *,
        create_last: bool = False,
    ) -> T:
        """Cut the rows into items; see `LaunchedAllToAllDispatcher`."""
        rows, self._weights = self.dispatch_preprocess(hidden, routing_map, probs)
        numbers = self.tokens_per_expert
        for point in ("before_ep_alltoall", "before_permutation_2"):
            numbers = self._maybe_dtoh_and_synchronize(point, numbers)
        experts = self.num_local_experts
        # By rank and local expert: the numbers of rows to others, in the order of the rows, and from them.
        self._sent: list[int] = self.routing_map.sum(0).tolist()
        # By tensor-parallel rank, expert-parallel rank and local expert.
        everywhere = self.num_global_tokens_per_local_expert.view(self.tp_size, self.ep_size, experts)
        received: list[list[int]] = everywhere[self._tensor_rank()].tolist()
        gathered: list[list[int]] = everywhere.sum(1).tolist()
        parts = rows.split(self._sent)
        self._items = []
        for expert in range(experts):
            there = [of_rank[expert] for of_rank in received]
            here = self._sent[expert::experts]
            exchanges = self._exchanges(expert, there, here, [of_rank[expert] for of_rank in gathered])
            self._items.append(Item(expert, torch.cat(parts[expert::experts]), *exchanges))
        return create()

    def wait_dispatch(self) -> Any:
        """Return the pipeline, for the experts."""
        items = self._items
        # This object may live until backward, the rows need not.
        del self._items
        # Experts that no tensor parallelism cuts have one exchange, and nothing to keep apart.
        order = pipelined_apart if self._apart and self.tp_size > 1 else pipelined
        return (lambda compute: order(items, compute),)

    def _exchanges(
        self, number: int, received: list[int], sent: list[int], gathered: list[int]
    ) -> tuple[list[Exchange], list[Exchange]]:
        """Return the exchanges of an item, there and back."""
        there: list[Exchange] = [AllToAll(f"dispatch {number}", self.ep_group, received, sent)]
        back: list[Exchange] = [AllToAll(f"combine {number}", self.ep_group, sent, received)]
        if self.tp_size > 1:
            there.append(GatherRows(f"gather {number}", self.tp_group, gathered))
            back.insert(0, ReduceRows(f"scatter {number}", self.tp_group, gathered))
        return there, back

    def _tensor_rank(self) -> int:
        return int(self.tp_group.rank()) if self.tp_size > 1 else 0

    def launch_combine(self, results: Any) -> None:
        """Take over the results of the items, which are back already."""
        self._parts: list[Tensor] = results

    def wait_combine(self) -> Tensor:
        """Return the weighted sums of each token's results, ``[s, b, h]``."""
        experts = self.num_local_experts
        by_expert = [part.split(self._sent[at::experts]) for at, part in enumerate(self._parts)]
        del self._parts
        rows = torch.cat([part for of_rank in zip(*by_expert, strict=True) for part in of_rank])
        weighted = (rows * self._weights.unsqueeze(-1)).to(rows.dtype)
        output: Tensor = self.combine_postprocess(weighted)
        return output


class PipelinedGroupedExperts(GroupedExperts):
    """Grouped experts that are computed one by one."""

    def forward(self, run: Run) -> tuple[list[Tensor], None]:  # type: ignore[override]
        """Run a pipeline with this rank's experts; see `Run`."""
        experts, hidden = self.num_local_experts, self.config.hidden_size
        # Taken apart once: the gradients of all items come back as one tensor.
        firsts = self.weight1.view(experts, hidden, -1).unbind()
        seconds = self.weight2.view(experts, -1, hidden).unbind()

        def compute(expert: int, rows: Tensor) -> Tensor:
            inner = self.activation_func_with_probs(rows @ firsts[expert], rows.new_ones(rows.shape[0], 1))
            result: Tensor = inner @ seconds[expert]
            return result

        return run(compute), None


class PipelinedPlainExperts(PlainExperts):
    """Sequential experts that are computed while rows of the next one travel."""

    def forward(self, run: Run) -> tuple[list[Tensor], None]:
        """Run a pipeline with this rank's experts; see `Run`."""

        def compute(expert: int, rows: Tensor) -> Tensor:
            result: Tensor = self.local_experts[expert](rows, rows.new_ones(rows.shape[0]))[0]
            return result

        return run(compute), None

"""Experts that are computed while the rows of the next one travel, and their dispatchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from mindspeed_core.megatron.experts import PlainExperts
from mindspeed_kernels.modules.grouped_experts import GroupedExperts
from mindspeed_moe.capacity_dispatcher import CapacityDispatcher
from mindspeed_moe.chunked import Item, pipelined
from mindspeed_moe.dispatchers import LaunchedAllToAllDispatcher
from mindspeed_moe.launch_wait import AllToAll

T = TypeVar("T")

Compute = Callable[[int, Tensor], Tensor]
"""Returns the results ``[m, h]`` of a local expert for its rows ``[m, h]``."""
Run = Callable[[Compute], list[Tensor]]
"""Runs the items of a layer; returns their results where their tokens are."""


class PipelinedDispatcher(CapacityDispatcher):
    """Places of experts travel by local expert and slice, each by an exchange of its own.

    What it hands to the experts is the pipeline itself: they are computed inside their own call, which is
    where their parameters are complete.
    """

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
        equal = [each] * self.ep_size
        self._items = [
            Item(
                number // slices,
                part,
                AllToAll(f"dispatch {number}", self.ep_group, equal, equal),
                AllToAll(f"combine {number}", self.ep_group, equal, equal),
            )
            for number, part in enumerate(parts.unbind())
        ]
        return create()

    def wait_dispatch(self) -> Any:
        """Return the pipeline, for the experts."""
        items = self._items
        # This object may live until backward, the rows need not.
        del self._items

        def run(compute: Compute) -> list[Tensor]:
            return pipelined(items, lambda expert, rows: self._whole(compute, expert, rows))

        return (run,)

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

    def _whole(self, compute: Compute, expert: int, rows: Tensor) -> Tensor:
        """Compute an expert that may be cut over ranks."""
        if self.tp_size == 1:
            return compute(expert, rows)
        rows = gather_from_sequence_parallel_region(rows, group=self.tp_group)
        return reduce_scatter_to_sequence_parallel_region(compute(expert, rows), group=self.tp_group)


class PipelinedRowsDispatcher(LaunchedAllToAllDispatcher):
    """Rows travel by local expert, as many as there are, each expert's by an exchange of its own.

    The router's weights stay with the tokens and multiply the results that come back.
    """

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
        received: list[list[int]] = self.num_global_tokens_per_local_expert.tolist()
        parts = rows.split(self._sent)
        self._items = []
        for expert in range(experts):
            there = [of_rank[expert] for of_rank in received]
            here = self._sent[expert::experts]
            self._items.append(
                Item(
                    expert,
                    torch.cat(parts[expert::experts]),
                    AllToAll(f"dispatch {expert}", self.ep_group, there, here),
                    AllToAll(f"combine {expert}", self.ep_group, here, there),
                )
            )
        return create()

    def wait_dispatch(self) -> Any:
        """Return the pipeline, for the experts."""
        items = self._items
        # This object may live until backward, the rows need not.
        del self._items
        return (lambda compute: pipelined(items, compute),)

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

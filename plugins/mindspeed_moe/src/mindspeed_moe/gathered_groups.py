"""Experts that are cut over ranks, computed group by group: rows of a group are gathered under another one.

Rows travel to the ranks of their experts at once. From there on experts are taken in groups of equal size:
while one group is computed, the rows of the next one are gathered from the ranks that an expert is cut over,
and the sums of the results of the one before are scattered to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.modules.grouped_experts import GroupedExperts
from mindspeed_kernels.ops.gmm import grouped_matmul
from mindspeed_megatron.experts import PlainExperts
from mindspeed_moe.chunked import Item, pipelined
from mindspeed_moe.dispatchers import LaunchedAllToAllDispatcher
from mindspeed_moe.launch_wait import GatherRows, ReduceRows

Compute = Callable[[int, Tensor, Tensor, list[int]], Tensor]
"""Returns the results ``[m, h]`` of a group: of its number, its rows ``[m, h]`` sorted by expert, their
probabilities ``[m]`` and the rows of each of its experts."""
Run = Callable[[Compute], list[Tensor]]
"""Runs the groups of a layer; returns the parts of their results that belong to this rank's rows."""


class GatheredGroupsDispatcher(LaunchedAllToAllDispatcher):
    """Rows travel to their experts at once, and are gathered group by group."""

    def __init__(self, *args: Any, groups: int, **options: Any) -> None:
        """Build megatron-core's dispatcher, whose experts are computed in so many groups."""
        super().__init__(*args, **options)
        self._groups = groups

    def wait_dispatch(self) -> Any:
        """Return the pipeline over groups, for the experts."""
        rows, probs = self._there.wait(self._rows), self._with_them.wait(self._probs)
        # This object may live until backward, the buffers need not.
        del self._rows, self._probs
        numbers = self._numbers()
        # By expert here, by rank in each; [expert-parallel rank, local expert] until now.
        local = numbers[self.tp_group.rank()]
        self._arrived = local.t().flatten().tolist()
        rows = turned(rows, local.flatten().tolist(), self.ep_size)
        probs = turned(probs, local.flatten().tolist(), self.ep_size)
        of_ranks = numbers.sum(1)
        gather_probs = GatherRows("gather probs", self.tp_group, of_ranks.sum(1).tolist())
        everyones_probs = gather_probs.launch(probs)
        each = self.num_local_experts // self._groups
        by_group = of_ranks.view(self.tp_size, self._groups, each)
        parts = rows.split(by_group[self.tp_group.rank()].sum(1).tolist())
        items = []
        for group, part in enumerate(parts):
            gathered = by_group[:, group].sum(1).tolist()
            items.append(
                Item(
                    group,
                    part,
                    [GatherRows(f"gather {group}", self.tp_group, gathered)],
                    [ReduceRows(f"scatter {group}", self.tp_group, gathered)],
                )
            )

        def run(compute: Compute) -> list[Tensor]:
            whole = gather_probs.wait(everyones_probs).split(by_group.sum(2).flatten().tolist())

            def of_group(group: int, gathered: Tensor) -> Tensor:
                counts = by_group[:, group]
                there, back = counts.flatten().tolist(), counts.t().flatten().tolist()
                sorted_rows = turned(gathered, there, self.tp_size)
                sorted_probs = turned(torch.cat(whole[group :: self._groups]), there, self.tp_size)
                results = compute(group, sorted_rows, sorted_probs, counts.sum(0).tolist())
                return turned(results, back, each)

            return pipelined(items, of_group)

        return (run,)

    def launch_combine(self, results: Any) -> None:
        """Launch the exchange of the groups' results back to their tokens."""
        rows = turned(torch.cat(results), self._arrived, self.num_local_experts)
        self._results = self._back.launch(rows)

    def _numbers(self) -> Tensor:
        """Return numbers of rows ``[tensor-parallel rank, expert-parallel rank, local expert]``."""
        self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        numbers: Tensor = self.num_global_tokens_per_local_expert
        if self.drop_and_pad:
            numbers = torch.full(numbers.shape, int(self.capacity or 0))
        return numbers.view(self.tp_size, self.ep_size, self.num_local_experts)


def turned(rows: Tensor, counts: Sequence[int], outer: int) -> Tensor:
    """Return groups of rows that lie by an outer, then an inner index, by the inner, then the outer one.

    Args:
        rows: ``[m, ...]``.
        counts: rows of each group, in their order.
        outer: how many values the outer index has.
    """
    inner = len(counts) // outer
    if outer == 1 or inner == 1:
        return rows
    pieces = rows.split(list(counts))
    return torch.cat([pieces[o * inner + i] for i in range(inner) for o in range(outer)])


class GroupsOfGroupedExperts(GroupedExperts):
    """Grouped experts that are computed group by group."""

    groups: int

    def __init__(self, *args: Any, groups: int, **options: Any) -> None:
        """Build grouped experts in so many groups."""
        super().__init__(*args, **options)
        self.groups = groups

    def forward(self, run: Run) -> tuple[list[Tensor], None]:  # type: ignore[override]
        """Run a pipeline with this rank's experts; see `Run`."""
        hidden = self.config.hidden_size
        each = self.num_local_experts // self.groups
        # Taken apart once: the gradients of all groups come back as one tensor.
        firsts = self.weight1.view(self.groups, each, hidden, -1).unbind()
        seconds = self.weight2.view(self.groups, each, -1, hidden).unbind()

        def compute(group: int, rows: Tensor, probs: Tensor, counts: list[int]) -> Tensor:
            ends = torch.tensor(counts).cumsum(0)
            inner = grouped_matmul(rows, firsts[group], ends)
            inner = self.activation_func_with_probs(inner, probs.unsqueeze(-1))
            return grouped_matmul(inner, seconds[group], ends)

        return run(compute), None


class GroupsOfPlainExperts(PlainExperts):
    """Sequential experts that are computed group by group."""

    groups: int

    def __init__(self, *args: Any, groups: int, **options: Any) -> None:
        """Build sequential experts in so many groups."""
        super().__init__(*args, **options)
        self.groups = groups

    def forward(self, run: Run) -> tuple[list[Tensor], None]:
        """Run a pipeline with this rank's experts; see `Run`."""
        each = len(self.local_experts) // self.groups

        def compute(group: int, rows: Tensor, probs: Tensor, counts: list[int]) -> Tensor:
            experts = self.local_experts[group * each : (group + 1) * each]
            parts = zip(experts, rows.split(counts), probs.split(counts), strict=True)
            return torch.cat([expert(of_expert, weights)[0] for expert, of_expert, weights in parts])

        return run(compute), None

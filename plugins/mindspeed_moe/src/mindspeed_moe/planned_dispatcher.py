"""A dispatcher that follows a plan of communication, hop by hop.

Between launch and wait is the first hop, over the slowest network: what a layer computes there runs beside
it. Later hops start when the one before has arrived, and are waited for at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_moe.comm_plans import Hops
from mindspeed_moe.hops import HopCall, Routed, hop_call
from mindspeed_moe.row_counts import RowCounts
from mindspeed_moe.row_spread import gathered_sum, spread

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """A plan on this rank.

    Attributes:
        hops: of the plan.
        groups: this rank's group of each hop.
        group: the ranks of experts, in the order of experts.
    """

    hops: Hops
    groups: Sequence[dist.ProcessGroup]
    group: dist.ProcessGroup


class PlannedDispatcher:
    """Rows travel once to each place that has experts of them; see `LaunchedAllToAllDispatcher`.

    A layer takes a copy for each call.
    """

    def __init__(self, plan: Plan, num_local_experts: int) -> None:
        """Follow a plan.

        Args:
            plan: on this rank.
            num_local_experts: experts of a rank.
        """
        self._plan = plan
        self._num_local_experts = num_local_experts

    def launch_dispatch(
        self,
        hidden: Tensor,
        routing_map: Tensor,
        probs: Tensor,
        create: Callable[[], T],
        *,
        create_last: bool = False,
    ) -> T:
        """Launch the first hop of ``[s, b, h]``; see `LaunchedAllToAllDispatcher`."""
        self._shape, routing_map = hidden.shape, routing_map.contiguous()
        rows = hidden.reshape(-1, hidden.shape[-1])
        self._tokens, self._token_probs = rows.detach(), probs.detach()
        sizes = [hop.ranks for hop in self._plan.hops]
        counts = RowCounts(routing_map, sizes, self._plan.group)
        experts = routing_map.shape[1]
        self._hops: list[HopCall] = [
            hop_call(number, hop.gathers, group, counts, experts // prod(sizes[: number + 1]))
            for number, (hop, group) in enumerate(zip(self._plan.hops, self._plan.groups, strict=True))
        ]
        self._counts = counts.local()
        return self._hops[0].launch(Routed(rows, routing_map, probs), create, create_last)

    def wait_dispatch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows ``[m, h]`` sorted by local expert, their numbers ``[E]`` and probabilities ``[m]``."""
        routed = self._hops[0].wait()
        for hop in self._hops[1:]:
            hop.launch(routed, lambda: None, create_last=True)
            routed = hop.wait()
        self._arrived = routed.rows.shape[0]
        self._sorted = routed.routing_map.t().reshape(-1).nonzero().squeeze(1)
        self._index = self._sorted % max(1, self._arrived)
        rows = spread(routed.rows, self._index, self._counts)
        return rows, torch.tensor(self._counts), self._by_expert(routed.probs)

    def launch_combine(self, results: Tensor) -> None:
        """Take the experts' results ``[m, h]`` back to the first hop, and launch that."""
        results = gathered_sum(results, self._index, self._counts, self._arrived)
        for hop in reversed(self._hops[1:]):
            hop.launch_back(results)
            results = hop.wait_back()
        self._hops[0].launch_back(results)

    def wait_combine(self) -> Tensor:
        """Return the sums of each token's results, ``[s, b, h]``."""
        return self._hops[0].wait_back().view(self._shape)

    def send_again(self, with_probs: bool) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Launch in backward what `launch_dispatch` sent, without gradients; returns what waits for it."""
        first = self._hops[0].start_again(self._tokens, self._token_probs if with_probs else None)

        def arrive() -> tuple[Tensor, Tensor | None]:
            rows, probs = first()
            for hop in self._hops[1:]:
                rows, probs = hop.start_again(rows, probs)()
            rows = rows.index_select(0, self._index)
            return rows, None if probs is None else self._by_expert(probs)

        return arrive

    def _by_expert(self, probs: Tensor) -> Tensor:
        """Return probabilities ``[m]`` of ``[rows, experts]``, as rows are sorted."""
        return probs.t().reshape(-1).index_select(0, self._sorted)

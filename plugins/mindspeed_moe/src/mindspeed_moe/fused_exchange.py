"""Experts whose products and exchanges are single operators, `mindspeed_kernels.ops`.

The first product of experts takes rows where their tokens are and the second one brings results back
there, so that a kernel may send some rows while it multiplies others. Where no kernel is at hand the
operators are an exchange and a product, one after the other. The router's probabilities travel by themselves:
they multiply the activation between both products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from mindspeed_kernels.modules.grouped_experts import GroupedExperts
from mindspeed_kernels.ops import (
    all2all_grouped_matmul,
    grouped_matmul_all2all,
    npu_alltoall_allgather_bmm,
    npu_bmm_reducescatter_alltoall,
)
from mindspeed_moe.dispatchers import LaunchedAllToAllDispatcher
from mindspeed_moe.gathered_groups import turned
from mindspeed_moe.launch_wait import AllGather, AllToAll

T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """Rows that are still where their tokens are, and where they go.

    Attributes:
        rows: ``[m, h]``, by the rank of their expert, then by expert.
        probs: ``[n]``, of the rows that arrive, by expert, then by the rank of their token.
        group: the ranks that exchange.
        sent: rows to each expert of each rank.
        received: rows of each rank for each of this rank's experts.
    """

    rows: Tensor
    probs: Tensor
    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]


@dataclass(frozen=True)
class Places:
    """Places of experts that are still where their tokens are.

    Attributes:
        rows: ``[E, C, h]``.
        probs: ``[E / ep, ep tp C]``, of the rows that a cut expert gets, as its product has them.
        ep: the ranks of experts.
        tp: the ranks that an expert is cut over.
    """

    rows: Tensor
    probs: Tensor
    ep: dist.ProcessGroup
    tp: dist.ProcessGroup


class _StayingDispatcher(LaunchedAllToAllDispatcher):
    """Common part of dispatchers whose rows travel inside the experts' products."""

    def launch_dispatch(
        self,
        hidden: Tensor,
        routing_map: Tensor,
        probs: Tensor,
        create: Callable[[], T],
        *,
        create_last: bool = False,
    ) -> T:
        """Permute ``[s, b, h]`` and launch the probabilities; see `LaunchedAllToAllDispatcher`."""
        self._rows, row_probs = self.dispatch_preprocess(hidden, routing_map, probs)
        self._maybe_dtoh_and_synchronize("before_ep_alltoall", self.tokens_per_expert)
        received, sent = self._split(self.output_splits), self._split(self.input_splits)
        self._with_them = AllToAll("probs", self.ep_group, received, sent)
        self._probs = self._with_them.launch(row_probs)
        return create()

    def launch_combine(self, results: Tensor) -> None:
        """Take over the results ``[m, h]``, which are where their tokens are."""
        self._results = results

    def wait_combine(self) -> Tensor:
        """Return the sums of each token's results, ``[s, b, h]``."""
        results = self._results
        del self._results
        output: Tensor = self.combine_postprocess(results)
        return output

    def _taken(self) -> tuple[Tensor, Tensor]:
        rows, probs = self._rows, self._with_them.wait(self._probs)
        # This object may live until backward, the rows need not.
        del self._rows, self._probs
        return rows, probs


class StayingRowsDispatcher(_StayingDispatcher):
    """As many rows travel as there are, inside the products of `ExchangingExperts`."""

    def wait_dispatch(self) -> Any:
        """Return `Rows` for the experts."""
        rows, probs = self._taken()
        self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        # With one expert of a rank megatron-core counts by rank only.
        numbers = self.num_global_tokens_per_local_expert if self.num_local_experts > 1 else None
        received = self._split(self.output_splits) if numbers is None else numbers.flatten().tolist()
        sent = self.routing_map.sum(0).tolist()
        probs = turned(probs, received, self.ep_size)
        return (Rows(rows, probs, self.ep_group, sent, received),)


class StayingPlacesDispatcher(_StayingDispatcher):
    """Equally many places of each expert travel, inside the products of `BatchedExperts`."""

    def wait_dispatch(self) -> Any:
        """Return `Places` for the experts."""
        rows, probs = self._taken()
        gather = AllGather("gather probs", self.tp_group)
        everyones = gather.wait(gather.launch(probs))
        each = everyones.view(self.tp_size, self.ep_size, self.num_local_experts, -1)
        of_experts = each.permute(2, 1, 0, 3).flatten(1)
        places = rows.view(self.num_experts, -1, rows.shape[-1])
        return (Places(places, of_experts, self.ep_group, self.tp_group),)

    def launch_combine(self, results: Tensor) -> None:
        """Take over the results ``[E, C, h]``, which are where their tokens are."""
        super().launch_combine(results.flatten(0, 1))


class ExchangingExperts(GroupedExperts):
    """Grouped experts whose products exchange rows."""

    def forward(self, travel: Rows) -> tuple[Tensor, None]:  # type: ignore[override]
        """Compute ``[m, h]`` of rows that are where their tokens are, and bring results back there."""
        experts, hidden = self.num_local_experts, self.config.hidden_size
        first = self.weight1.view(experts, hidden, -1)
        second = self.weight2.view(experts, -1, hidden)
        there, back = (travel.sent, travel.received), (travel.received, travel.sent)
        inner: Any = all2all_grouped_matmul(travel.rows, first, travel.group, *there)
        inner = self.activation_func_with_probs(inner, travel.probs.unsqueeze(-1))
        result: Any = grouped_matmul_all2all(inner, second, travel.group, *back)
        return result, None


class BatchedExperts(GroupedExperts):
    """Grouped experts with equally many rows each, whose batched products exchange, gather and scatter."""

    def forward(self, places: Places) -> tuple[Tensor, None]:  # type: ignore[override]
        """Compute ``[E, C, h]`` of places that are where their tokens are, and bring results back there."""
        experts, hidden = self.num_local_experts, self.config.hidden_size
        groups = places.ep, places.ep.size(), places.tp, places.tp.size()
        inner, _, _ = npu_alltoall_allgather_bmm(
            places.rows, self.weight1.view(experts, hidden, -1), *groups, shard_type=1
        )
        shape = inner.shape[:2]
        inner = self.activation_func_with_probs(inner.flatten(0, 1), places.probs.reshape(-1, 1))
        second = self.weight2.view(experts, -1, hidden)
        result = npu_bmm_reducescatter_alltoall(inner.view(*shape, -1), second, *groups, shard_type=1)
        return result, None

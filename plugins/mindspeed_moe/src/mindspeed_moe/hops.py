"""One hop of a plan of communication in one call of a layer: rows, their masks and their probabilities.

The mask of a row says which experts behind the hop compute it, one bit each; of its probabilities those are
sent that are used. Neither is sent with results, which come back as one row for each that was sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_moe.launch_wait import AllGather, AllToAll, Exchange, ReduceScatter
from mindspeed_moe.row_counts import RowCounts, Splits
from mindspeed_moe.row_spread import gathered_sum, spread

T = TypeVar("T")


@dataclass(frozen=True)
class Routed:
    """Rows and where they go.

    Attributes:
        rows: ``[n, h]``.
        routing_map: bool ``[n, experts]``.
        probs: ``[n, experts]``.
    """

    rows: Tensor
    routing_map: Tensor
    probs: Tensor


class HopCall(ABC):
    """One hop of one call; its exchanges are launched in one place and waited for in another."""

    _rows: Tensor
    _probs: Tensor
    _results: Tensor
    _there: Exchange
    _with_them: Exchange
    _back: Exchange
    _of_masks: Exchange

    def launch(self, routed: Routed, create: Callable[[], T], create_last: bool) -> T:
        """Launch masks, rows and probabilities.

        Args:
            routed: what this rank has.
            create: creates the nodes that backward reaches while gradients of rows are in flight.
            create_last: see `mindspeed_moe.dispatchers.LaunchedAllToAllDispatcher.launch_dispatch`.

        Returns:
            The result of ``create``.
        """
        masks, rows, probs = self._prepare(routed)
        self._of_masks.start(packed(masks), mirrored=False)
        self._rows = self._there.launch(rows)
        if create_last:
            self._probs = self._with_them.launch(probs)
            return create()
        created = create()
        self._probs = self._with_them.launch(probs)
        return created

    def wait(self) -> Routed:
        """Return what arrived, with masks and probabilities of the experts behind the hop."""
        masks = self._of_masks.finish()
        rows, probs = self._there.wait(self._rows), self._with_them.wait(self._probs)
        del self._rows, self._probs
        return self._arrived(rows, masks, probs)

    def launch_back(self, results: Tensor) -> None:
        """Launch the results ``[m, h]`` of the rows that arrived."""
        self._results = self._back.launch(results)

    def wait_back(self) -> Tensor:
        """Return the sums of each row's results, ``[n, h]``."""
        results = self._back.wait(self._results)
        del self._results
        return self._summed(results)

    @abstractmethod
    def start_again(self, rows: Tensor, probs: Tensor | None) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Launch rows and probabilities once more, without gradients; returns what waits for them."""

    @abstractmethod
    def _prepare(self, routed: Routed) -> tuple[Tensor, Tensor, Tensor]:
        """Return masks, rows and probabilities as they are sent."""

    @abstractmethod
    def _arrived(self, rows: Tensor, masks: Tensor, probs: Tensor) -> Routed: ...

    @abstractmethod
    def _summed(self, results: Tensor) -> Tensor: ...


class SentOnce(HopCall):
    """Each row travels once to each rank behind which it has experts."""

    def __init__(
        self, name: str, group: dist.ProcessGroup, rows: Splits, probs: Splits, experts: int
    ) -> None:
        """Describe the hop.

        Args:
            name: of the hop, for whoever records the order of events.
            group: its ranks.
            rows: that are exchanged.
            probs: that are exchanged.
            experts: of a row's mask that arrives.
        """
        self._name, self._group = name, group
        self._row_splits, self._prob_splits, self._experts = rows, probs, experts
        self._there, self._with_them = self._exchanges("")
        self._of_masks = AllToAll(f"masks{name}", group, rows.received, rows.sent)
        self._back = AllToAll(f"combine{name}", group, rows.sent, rows.received)

    def start_again(self, rows: Tensor, probs: Tensor | None) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Launch rows and probabilities once more, without gradients; returns what waits for them."""
        of_rows, of_probs = self._exchanges(" again")
        of_rows.start(rows.index_select(0, self._index), mirrored=False)
        if probs is not None:
            of_probs.start(self._used(probs), mirrored=False)

        def arrive() -> tuple[Tensor, Tensor | None]:
            here = of_rows.finish()
            return here, self._dense(of_probs.finish()) if probs is not None else None

        return arrive

    def _exchanges(self, what: str) -> tuple[AllToAll, AllToAll]:
        rows, probs = self._row_splits, self._prob_splits
        return (
            AllToAll(f"dispatch{what}{self._name}", self._group, rows.received, rows.sent),
            AllToAll(f"probs{what}{self._name}", self._group, probs.received, probs.sent),
        )

    def _prepare(self, routed: Routed) -> tuple[Tensor, Tensor, Tensor]:
        self._number = routed.rows.shape[0]
        masks = self._by_rank(routed.routing_map)
        self._sent = masks.any(-1).nonzero().squeeze(1)
        self._index = self._sent % max(1, self._number)
        masks = masks.index_select(0, self._sent)
        self._used_here = masks.reshape(-1).nonzero().squeeze(1)
        rows = spread(routed.rows, self._index, self._row_splits.sent)
        return masks, rows, self._used(routed.probs)

    def _by_rank(self, per_expert: Tensor) -> Tensor:
        """Return ``[ranks n, experts behind each]`` of ``[n, experts]``, rank by rank."""
        ranks = self._group.size()
        shape = self._number, ranks, self._experts
        return per_expert.view(shape).transpose(0, 1).reshape(ranks * self._number, self._experts)

    def _used(self, probs: Tensor) -> Tensor:
        """Return the probabilities ``[m]`` that are used, row by row as rows are sent."""
        of_rows = self._by_rank(probs).index_select(0, self._sent)
        return of_rows.reshape(-1).index_select(0, self._used_here)

    def _arrived(self, rows: Tensor, masks: Tensor, probs: Tensor) -> Routed:
        routing_map = unpacked(masks, self._experts)
        self._used_there = routing_map.reshape(-1).nonzero().squeeze(1)
        return Routed(rows, routing_map, self._dense(probs))

    def _dense(self, used: Tensor) -> Tensor:
        """Return the probabilities ``[rows, experts]`` that arrived as ``[m]``."""
        rows = sum(self._row_splits.received)
        none = used.new_zeros(rows * self._experts)
        return none.index_copy(0, self._used_there, used).view(rows, self._experts)

    def _summed(self, results: Tensor) -> Tensor:
        return gathered_sum(results, self._index, self._row_splits.sent, self._number)


class GatheredByAll(HopCall):
    """All rows of all ranks travel to each of them; sums of results over ranks come back."""

    def __init__(self, name: str, group: dist.ProcessGroup, experts: int, width: int) -> None:
        """Describe the hop.

        Args:
            name: of the hop, for whoever records the order of events.
            group: its ranks.
            experts: of a row's mask behind the hop.
            width: most experts of a row.
        """
        self._name, self._group, self._experts, self._width = name, group, experts, width
        self._there = AllGather(f"dispatch{name}", group)
        self._with_them = AllGather(f"probs{name}", group)
        self._of_masks = AllGather(f"masks{name}", group)
        self._back = ReduceScatter(f"combine{name}", group)

    def start_again(self, rows: Tensor, probs: Tensor | None) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Launch rows and probabilities once more, without gradients; returns what waits for them."""
        of_rows = AllGather(f"dispatch again{self._name}", self._group)
        of_probs = AllGather(f"probs again{self._name}", self._group)
        of_rows.start(rows, mirrored=False)
        if probs is not None:
            of_probs.start(probs.gather(1, self._chosen), mirrored=False)

        def arrive() -> tuple[Tensor, Tensor | None]:
            here = of_rows.finish()
            return here, self._dense(of_probs.finish()) if probs is not None else None

        return arrive

    def _prepare(self, routed: Routed) -> tuple[Tensor, Tensor, Tensor]:
        self._chosen = self._first_experts(routed.routing_map)
        return routed.routing_map, routed.rows, routed.probs.gather(1, self._chosen)

    def _first_experts(self, routing_map: Tensor) -> Tensor:
        """Return each row's experts, ``[n, width]``, and others behind them where it has fewer."""
        return routing_map.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : self._width]

    def _arrived(self, rows: Tensor, masks: Tensor, probs: Tensor) -> Routed:
        routing_map = unpacked(masks, self._experts * self._group.size())
        self._chosen_there = self._first_experts(routing_map)
        return Routed(rows, self._behind(routing_map), self._dense(probs))

    def _dense(self, chosen: Tensor) -> Tensor:
        """Return the probabilities ``[rows, experts]`` that arrived as ``[rows, width]``."""
        none = chosen.new_zeros(chosen.shape[0], self._experts * self._group.size())
        return self._behind(none.scatter(1, self._chosen_there, chosen))

    def _behind(self, per_expert: Tensor) -> Tensor:
        """Return the columns of the experts behind this rank."""
        first = self._group.rank() * self._experts
        return per_expert[:, first : first + self._experts]

    def _summed(self, results: Tensor) -> Tensor:
        return results


def hop_call(
    number: int, gathers: bool, group: dist.ProcessGroup, counts: RowCounts, experts: int
) -> HopCall:
    """Return one hop of one call.

    Args:
        number: of the hop, from 0.
        gathers: every rank gets all rows.
        group: its ranks.
        counts: of the call.
        experts: of a row's mask behind the hop.
    """
    name = f" {number + 1}" if number else ""
    if gathers:
        return GatheredByAll(name, group, experts, counts.width)
    return SentOnce(name, group, counts.rows(number), counts.probs(number), experts)


def packed(masks: Tensor) -> Tensor:
    """Return bool ``[n, experts]`` as uint8 ``[n, ceil(experts / 8)]``, the first expert the lowest bit."""
    padded = torch.nn.functional.pad(masks.to(torch.uint8), (0, -masks.shape[1] % 8))
    octets = padded.view(masks.shape[0], -(-masks.shape[1] // 8), 8)
    return (octets * _weights(masks.device)).sum(-1).to(torch.uint8)


def unpacked(octets: Tensor, experts: int) -> Tensor:
    """Return bool ``[n, experts]``, the inverse of `packed`."""
    bits = octets.unsqueeze(-1).bitwise_and(_weights(octets.device)) != 0
    return bits.reshape(octets.shape[0], octets.shape[1] * 8)[:, :experts]


def _weights(device: torch.device) -> Tensor:
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)

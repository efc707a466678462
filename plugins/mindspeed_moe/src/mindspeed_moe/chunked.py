"""A software pipeline over exchanges: the rows of one item travel while another one is computed.

The driver knows launch/wait pairs and a function, no model. Backward runs the mirrored pipeline by itself,
since each pair of autograd nodes mirrors its exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from mindspeed_moe.launch_wait import Exchange

K = TypeVar("K")


@dataclass(frozen=True)
class Item(Generic[K]):
    """A part of the work.

    Attributes:
        key: tells the function which part it is.
        rows: ``[n, ...]``, that are sent.
        outward: take them to where they are computed, one after the other.
        back: take results back, one after the other.
    """

    key: K
    rows: Tensor
    outward: Sequence[Exchange]
    back: Sequence[Exchange]


Compute = Callable[[K, Tensor], Tensor]
"""Returns the results of an item's key and received rows."""


def pipelined(items: Sequence[Item[K]], compute: Compute[K]) -> list[Tensor]:
    """Return the results of all items, in their order.

    While an item is computed, the last exchange of the next one's rows, the first of the results of the one
    before, and each further exchange of an item further away are in flight.

    Args:
        items: at least one; every rank of their groups has as many, in the same order.
        compute: returns the results of an item's key and received rows.
    """
    travels = [_Travel(item) for item in items]
    outward, back = len(items[0].outward), len(items[0].back)
    for slot in range(-outward, len(items) + back):
        for hop in range(outward):
            if 0 <= (number := slot + outward - hop) < len(items):
                travels[number].go_there(hop)
        for hop in range(1, back):
            if 0 <= (number := slot - 1 - hop) < len(items):
                travels[number].go_back(hop)
        if 0 <= slot < len(items):
            travels[slot].compute(compute)
            travels[slot].go_back(0)
    return [travel.arrive() for travel in travels]


def pipelined_apart(items: Sequence[Item[K]], compute: Compute[K]) -> list[Tensor]:
    """Return what `pipelined` returns, without two kinds of exchanges in flight together.

    Items take two exchanges in each direction, the inner ones over another network. The outer ones of two
    items run beside computation; the inner ones of two items run beside one another between two computations.

    Args:
        items: see `pipelined`; with two exchanges in each direction.
        compute: see `pipelined`.
    """
    travels = [_Travel(item) for item in items]
    by_number = dict(enumerate(travels))
    travels[0].go_there(0)
    for number in range(len(items) + 1):
        here, last = by_number.get(number), by_number.get(number - 1)
        for travel in (by_number.get(number - 2), here):
            if travel is not None:
                travel.wait()
        if last is not None:
            last.go_back(0)
        if here is not None:
            here.go_there(1)
        for travel in (last, here):
            if travel is not None:
                travel.wait()
        if last is not None:
            last.go_back(1)
        if number + 1 in by_number:
            by_number[number + 1].go_there(0)
        if here is not None:
            here.compute(compute)
    return [travel.arrive() for travel in travels]


class _Travel(Generic[K]):
    """An item on its way."""

    def __init__(self, item: Item[K]) -> None:
        self._item = item
        self._tensor = item.rows
        self._flying: Exchange | None = None

    def go_there(self, hop: int) -> None:
        self._launch(self._item.outward[hop])

    def compute(self, compute: Compute[K]) -> None:
        self.wait()
        self._tensor = compute(self._item.key, self._tensor)

    def go_back(self, hop: int) -> None:
        self._launch(self._item.back[hop])

    def wait(self) -> None:
        if self._flying is not None:
            self._tensor = self._flying.wait(self._tensor)
            self._flying = None

    def arrive(self) -> Tensor:
        self.wait()
        return self._tensor

    def _launch(self, exchange: Exchange) -> None:
        self.wait()
        self._tensor = exchange.launch(self._tensor)
        self._flying = exchange

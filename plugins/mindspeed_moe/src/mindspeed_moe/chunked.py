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
        there: takes them to where they are computed.
        back: takes results back.
    """

    key: K
    rows: Tensor
    there: Exchange
    back: Exchange


def pipelined(items: Sequence[Item[K]], compute: Callable[[K, Tensor], Tensor]) -> list[Tensor]:
    """Return the results of all items, in their order.

    While an item is computed, the rows of the next one and the results of those before are in flight.

    Args:
        items: at least one; every rank of their groups has as many, in the same order.
        compute: returns the results of an item's key and received rows.
    """
    arriving = items[0].there.launch(items[0].rows)
    leaving = []
    for item, following in zip(items, [*items[1:], None], strict=True):
        here = arriving
        if following is not None:
            arriving = following.there.launch(following.rows)
        leaving.append(item.back.launch(compute(item.key, item.there.wait(here))))
    return [item.back.wait(results) for item, results in zip(items, leaving, strict=True)]

"""Numbers of rows that ranks exchange in each hop of a plan, from one gathering of counts.

A rank knows where its own tokens go, not what the ranks that it forwards for receive. All counts therefore
travel once, ahead of everything else, and are read by the host once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Splits:
    """Numbers that a rank exchanges with each rank of a hop, in the order of its group.

    Attributes:
        sent: to each.
        received: from each.
    """

    sent: list[int]
    received: list[int]


class RowCounts:
    """Numbers of rows and probabilities of one call of a layer, of all ranks.

    Attributes:
        width: experts of the token that has most.
    """

    def __init__(self, routing_map: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
        """Gather the counts; waits for them.

        Args:
            routing_map: bool ``[tokens, experts]``.
            sizes: ranks of each hop.
            group: the ranks of experts.
        """
        self._sizes, self._ranks, self._rank = list(sizes), group.size(), group.rank()
        tokens, experts = routing_map.shape
        reached = [prod(self._sizes[: hop + 1]) for hop in range(len(self._sizes))]
        local = [routing_map.view(tokens, parts, -1).any(-1).sum(0) for parts in reached]
        width = routing_map.sum(1).amax(0, keepdim=True)
        counts = torch.cat([*local, routing_map.sum(0), width]).long()
        everyones = counts.new_empty(self._ranks * counts.numel())
        dist.all_gather_into_tensor(everyones, counts, group=group)
        table: Any = everyones.view(self._ranks, -1).cpu().numpy()
        ends = torch.tensor([0, *reached]).cumsum(0).tolist()
        self._rows = [table[:, start:end] for start, end in pairwise(ends)]
        self._entries = table[:, ends[-1] : ends[-1] + experts]
        self.width = int(table[:, -1].max())

    def rows(self, hop: int) -> Splits:
        """Return the rows that this rank exchanges in a hop."""
        return self._splits(hop, self._rows[hop])

    def probs(self, hop: int) -> Splits:
        """Return the probabilities that this rank exchanges in a hop."""
        parts = prod(self._sizes[: hop + 1])
        return self._splits(hop, self._entries.reshape(self._ranks, parts, -1).sum(-1))

    def local(self) -> list[int]:
        """Return the rows of each expert of this rank."""
        every = self._entries.sum(0).reshape(self._ranks, -1)
        return [int(rows) for rows in every[self._rank]]

    def _splits(self, hop: int, counts: Any) -> Splits:
        """Return splits from counts ``[source rank, digits up to the hop]``."""
        size, before = self._sizes[hop], prod(self._sizes[:hop])
        stride = self._ranks // before
        step = stride // size
        prefix, digit = self._rank // stride, self._rank // step % size
        first = prefix * size
        # Before a hop a rank has the tokens of the ranks that agree with it in all later digits.
        held = counts[self._rank % stride :: stride].sum(0)
        sent = [int(held[first + other]) for other in range(size)]
        peers = [self._rank + (other - digit) * step for other in range(size)]
        received = [int(counts[peer % stride :: stride, first + digit].sum()) for peer in peers]
        return Splits(sent, received)

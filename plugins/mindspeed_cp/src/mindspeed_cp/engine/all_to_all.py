"""Flat parts exchanged among the ranks of a group, counted where somebody counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_cp.engine import counters


class PartsExchange:
    """A part for every rank on its way there, and one from every rank on its way here."""

    def __init__(self, parts: Sequence[Tensor], sizes: Sequence[int], group: ProcessGroup) -> None:
        """Start the exchange of flat parts, one for every rank; ``sizes`` elements come from each."""
        if counters.active is not None:
            me = group.rank()
            foreign = sum(part.nbytes for place, part in enumerate(parts) if place != me)
            counters.sent(counters.ALL_TO_ALL, foreign)
        self._sizes = list(sizes)
        # Held until it has left.
        self._leaving = torch.cat(list(parts))
        self._came = self._leaving.new_empty(sum(sizes))
        self._work = dist.all_to_all_single(
            self._came,
            self._leaving,
            self._sizes,
            [part.numel() for part in parts],
            group=group,
            async_op=True,
        )

    def wait(self) -> tuple[Tensor, ...]:
        """Wait and return the flat parts that came, by rank."""
        self._work.wait()
        return self._came.split(self._sizes)

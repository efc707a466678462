"""Exchange of shards: pieces of a matrix travel to one of its holders, and the update travels back.

The distributed optimizer cuts matrices anywhere. Each matrix gets one owner among the ranks that have a piece
of it, so that what lies on one rank does not travel at all. Who has what is computed on every rank; the
pieces of all matrices go in one ``all_to_all``, and the updates in another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

Held = Mapping[int, tuple[int, int]]
"""Ranks that hold something of a matrix, each with its ``(start, stop)`` in the flattened matrix."""


def owners(costs: Sequence[float], held: Sequence[Held]) -> list[int]:
    """Choose a rank for each matrix, among those that hold something of it, so that all have as much to do.

    The most expensive matrix is given away first, each to the holder with the least so far, of several to the
    one with the largest piece. Every rank comes to the same result.

    Args:
        costs: work of each matrix.
        held: who has what of each matrix.
    """
    load: dict[int, float] = {}
    chosen = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        pieces = {rank: stop - start for rank, (start, stop) in held[index].items()}
        best = min(pieces, key=lambda rank: (load.get(rank, 0.0), -pieces[rank], rank))
        chosen[index] = best
        load[best] = load.get(best, 0.0) + costs[index]
    return chosen


class Exchange:
    """The two exchanges of a list of matrices among the ranks of a group.

    Attributes:
        owned: indices of the matrices that this rank owns.
        sent: elements that this rank sends to others, in both exchanges together.
    """

    def __init__(self, group: Any, costs: Sequence[float], held: Sequence[Held]) -> None:
        """Plan who owns what.

        Args:
            group: the ranks.
            costs: work of each matrix.
            held: who has what of each matrix, by rank of the group.
        """
        self._group, self._held = group, held
        self._rank = group.rank()
        chosen = owners(costs, held)
        self.owned = [index for index, owner in enumerate(chosen) if owner == self._rank]
        self._leaving: list[list[int]] = [[] for _ in range(group.size())]
        self._coming: list[list[int]] = [[] for _ in range(group.size())]
        self._still = all(list(pieces) == [owner] for owner, pieces in zip(chosen, held))
        for index, (owner, pieces) in enumerate(zip(chosen, held)):
            if owner == self._rank:
                for rank in pieces:
                    if rank != owner:
                        self._coming[rank].append(index)
            elif self._rank in pieces:
                self._leaving[owner].append(index)
        self.sent = sum(map(sum, self._sizes_coming())) + sum(map(sum, self._sizes_leaving()))

    def gather(self, pieces: Mapping[int, torch.Tensor], like: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the matrices that this rank owns, flattened. Collective.

        Args:
            pieces: this rank's piece of each matrix of which it has one, flattened.
            like: any tensor, on the device and in the dtype of the pieces.
        """
        leaving = [[pieces[index] for index in indices] for indices in self._leaving]
        arrived = self._all_to_all(leaving, self._sizes_coming(), like)
        found = {}
        for index in self.owned:
            found[index] = like.new_empty(max(stop for _, stop in self._held[index].values()))
            self._piece(found[index], index, self._rank).copy_(pieces[index])
        for rank, tensors in enumerate(arrived):
            for index, tensor in zip(self._coming[rank], tensors):
                self._piece(found[index], index, rank).copy_(tensor)
        return found

    def scatter(self, wholes: Mapping[int, torch.Tensor], like: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return this rank's piece of every matrix of which it has one. Collective.

        Args:
            wholes: the matrices that this rank owns, flattened.
            like: as in `gather`.
        """
        leaving = [
            [self._piece(wholes[index], index, rank) for index in indices]
            for rank, indices in enumerate(self._coming)
        ]
        arrived = self._all_to_all(leaving, self._sizes_leaving(), like)
        found = {index: self._piece(wholes[index], index, self._rank) for index in self.owned}
        for indices, tensors in zip(self._leaving, arrived):
            found.update(zip(indices, tensors))
        return found

    def _piece(self, whole: torch.Tensor, index: int, rank: int) -> torch.Tensor:
        start, stop = self._held[index][rank]
        return whole[start:stop]

    def _sizes_leaving(self) -> list[list[int]]:
        return [[self._size(index, self._rank) for index in indices] for indices in self._leaving]

    def _sizes_coming(self) -> list[list[int]]:
        return [[self._size(index, rank) for index in indices] for rank, indices in enumerate(self._coming)]

    def _size(self, index: int, rank: int) -> int:
        start, stop = self._held[index][rank]
        return stop - start

    def _all_to_all(
        self, leaving: list[list[torch.Tensor]], sizes: list[list[int]], like: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """Send tensors to each rank, and return those that each rank sends, of the sizes given."""
        if self._still:
            # On every rank: nobody has anything to send.
            return [[] for _ in sizes]
        tensors = [tensor for each in leaving for tensor in each]
        counts = [sum(each) for each in sizes]
        received = like.new_empty(sum(counts))
        dist.all_to_all_single(
            received,
            torch.cat(tensors) if tensors else like.new_empty(0),
            counts,
            [sum(tensor.numel() for tensor in each) for each in leaving],
            group=self._group,
        )
        return [list(part.split(each)) if each else [] for part, each in zip(received.split(counts), sizes)]

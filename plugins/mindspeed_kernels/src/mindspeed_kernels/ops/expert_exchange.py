"""Rows that ranks exchange between tokens and experts, by the counts of each pair of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_kernels.contract import ContractError
from mindspeed_kernels.ops import collectives
from mindspeed_kernels.ops.process_groups import process_group

Group = ProcessGroup | str
Counts = Sequence[int] | Tensor


class Routing(NamedTuple):
    """Numbers of rows that travel between this rank and every expert of the group.

    Attributes:
        group: the ranks that exchange.
        of_tokens: rows of this rank's tokens, by the rank they are multiplied on, then by its experts.
        of_experts: rows of this rank's experts, by the rank that has their tokens, then by expert.
    """

    group: ProcessGroup
    of_tokens: list[int]
    of_experts: list[int]

    @property
    def experts(self) -> int:
        """Number of experts of a rank."""
        return len(self.of_experts) // self.group.size()

    def ends(self) -> Tensor:
        """Return where the rows of each of this rank's experts end, int64 ``[e]``."""
        return torch.tensor(self.of_experts).view(self.group.size(), -1).sum(0).cumsum(0)

    def to_experts(self, x: Tensor) -> Tensor:
        """Bring rows by rank, then expert, to their experts' ranks; there they lie by expert, then rank."""
        sent, received = self.by_rank(self.of_tokens), self.by_rank(self.of_experts)
        arrived = collectives.all_to_all_rows(x, sent, received, self.group)
        return _turned(arrived, self.of_experts, self.group.size())

    def to_tokens(self, x: Tensor) -> Tensor:
        """Bring rows by expert, then rank, back to their tokens' ranks: the inverse of `to_experts`."""
        counts = torch.tensor(self.of_experts).view(self.group.size(), -1).t().flatten().tolist()
        received, sent = self.by_rank(self.of_tokens), self.by_rank(self.of_experts)
        return collectives.all_to_all_rows(_turned(x, counts, self.experts), sent, received, self.group)

    def by_rank(self, counts: list[int]) -> list[int]:
        """Return the rows for each rank, all of its experts together."""
        return [sum(counts[i : i + self.experts]) for i in range(0, len(counts), self.experts)]


def _turned(x: Tensor, counts: list[int], outer: int) -> Tensor:
    """Return groups of rows that lie by an outer, then an inner index, by the inner, then the outer one."""
    pieces = x.split(counts)
    inner = len(counts) // outer
    return torch.cat([pieces[o * inner + i] for i in range(inner) for o in range(outer)])


def routing_of(
    operator: str,
    inputs: Tensor,
    weights: Tensor,
    group: Group,
    sent: Counts,
    received: Counts,
    *,
    to_experts: bool,
) -> Routing:
    """Return the routing of a call; ``to_experts`` sends tokens to experts, otherwise they come back.

    Raises:
        ContractError: the counts are not those of the experts and rows.
    """
    ranks = process_group(group, f"{operator}: group")
    entries = ranks.size() * weights.shape[0]
    numbers = []
    for name, given in (("send_counts", sent), ("recv_counts", received)):
        found = given.flatten().tolist() if isinstance(given, Tensor) else [int(n) for n in given]
        if len(found) != entries or min(found, default=0) < 0:
            raise ContractError(
                f"{operator}: {name} must hold a number of rows for each of {weights.shape[0]} experts on "
                f"{ranks.size()} ranks, by rank, then expert; got {found}"
            )
        numbers.append(found)
    covered, rows = sum(numbers[0]), inputs.shape[0]
    if covered != rows:
        raise ContractError(f"{operator}: send_counts must cover all {rows} rows of inputs, cover {covered}")
    return Routing(ranks, *(numbers if to_experts else reversed(numbers)))

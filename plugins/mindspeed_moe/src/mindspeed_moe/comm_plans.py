"""Plans of communication: how rows travel to their experts, in one exchange or several; no torch.

The ranks of experts are numbered digit by digit: with nodes of two ranks, rank 5 of 8 is rank 1 of node 2. A
plan is a sequence of hops, one per digit from the slowest network to the fastest. Each takes a row to a rank
that has the digit of its experts, once for all experts that lie there; after the last hop a row is where its
experts are. Without hops a row travels once for each of its experts, in one exchange (`flat`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, prod
from typing import Any

from mindspeed_core.discovery.extensions import ExtensionError, installed_extensions
from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import DeclarationError
from mindspeed_moe.extension_points import COMM_PLANS

FLAG, NODE_SIZE = "--moe-comm-plan", "--moe-node-size"
FLAT, GATHER, DEDUP, AUTO = "flat", "gather", "dedup", "auto"


@dataclass(frozen=True)
class Hop:
    """One exchange of a plan, between ranks that differ in one digit of their number.

    Attributes:
        ranks: values of the digit, so many ranks exchange rows.
        gathers: every rank gets the rows of all of them; otherwise those that its digit's experts compute.
    """

    ranks: int
    gathers: bool = False


Hops = tuple[Hop, ...]
Planner = Callable[[int, int], Sequence[Hop]]
"""From the ranks of experts and the ranks of a node to the hops; their sizes multiply to the ranks."""


def gather_plan(ranks: int, node_size: int) -> Sequence[Hop]:
    """Gather all rows between nodes, and take them to their experts inside the node."""
    return Hop(ranks // node_size, gathers=True), Hop(node_size)


def dedup_plan(ranks: int, node_size: int) -> Sequence[Hop]:
    """Send a row once to each node that has experts of it, and once to each rank there."""
    return Hop(ranks // node_size), Hop(node_size)


_PLANNERS: dict[str, Planner] = {FLAT: lambda ranks, node_size: (), GATHER: gather_plan, DEDUP: dedup_plan}


def check_planner(contributed: Any) -> None:
    """Refuse what is no function.

    Raises:
        DeclarationError: says what it is.
    """
    if not callable(contributed):
        raise DeclarationError(
            f"a plan is a function from ranks and ranks of a node to hops, not {contributed!r}"
        )


def hops_of(name: str, ranks: int, node_size: int) -> Hops:
    """Return the hops of a plan, without those of one rank.

    Args:
        name: of the plan, not `AUTO`.
        ranks: that experts are spread over.
        node_size: how many of them are on one node; divides ``ranks``.

    Raises:
        ArgumentError: no package contributes the plan, or it does not reach all ranks.
    """
    planner = _PLANNERS.get(name)
    if planner is None:
        try:
            planner = installed_extensions(COMM_PLANS).get(name)
        except ExtensionError as error:
            raise ArgumentError(FLAG, name, str(error), "see --help") from error
    hops = tuple(planner(ranks, node_size))
    if hops and (not all(isinstance(hop, Hop) for hop in hops) or prod(hop.ranks for hop in hops) != ranks):
        raise ArgumentError(
            FLAG,
            name,
            f"reaches {ranks} ranks by {hops!r}",
            "a plan returns hops whose ranks multiply to them",
        )
    return tuple(hop for hop in hops if hop.ranks > 1)


@dataclass(frozen=True)
class Exchanged:
    """Sizes of what a rank's tokens send in one direction of a layer.

    Attributes:
        tokens: of the rank.
        choices: experts of a token.
        experts: of the model.
        row_bytes: of one token's row.
        prob_bytes: of one probability.
        reached: nodes that a token may go to at most, 0 for all.
    """

    tokens: int
    choices: int
    experts: int
    row_bytes: int
    prob_bytes: int = 4
    reached: int = 0

    def expected_parts(self, parts: int) -> float:
        """Return into how many of ``parts`` equal parts a token's experts fall, if all are chosen alike."""
        size = self.experts // parts
        # A router that chooses more experts than there are is refused later, with its own flag.
        choices = min(self.choices, self.experts)
        missed = comb(self.experts - size, choices) / comb(self.experts, choices)
        found = parts * (1 - missed)
        return min(found, self.reached) if self.reached else found

    def expected_bytes(self, hops: Hops, parts: int) -> float:
        """Return the bytes that a rank is expected to send to other parts, one direction, rows to experts.

        Args:
            hops: the plan's; the first one is between the parts. Empty for an exchange of all rows.
            parts: nodes.
        """
        elsewhere = (parts - 1) / parts
        if parts == 1:
            return 0.0
        if not hops:
            return self.tokens * self.choices * elsewhere * (self.row_bytes + self.prob_bytes)
        if hops[0].gathers:
            one = self.row_bytes + packed_bytes(self.experts) + self.choices * self.prob_bytes
            return self.tokens * (parts - 1) * one
        rows = self.expected_parts(parts) * elsewhere * (self.row_bytes + packed_bytes(self.experts // parts))
        return self.tokens * (rows + self.choices * elsewhere * self.prob_bytes)


def packed_bytes(experts: int) -> int:
    """Return the bytes of a row's mask of so many experts."""
    return -(-experts // 8)


def cheapest(sizes: Exchanged, ranks: int, node_size: int) -> str:
    """Return the plan that is expected to send the fewest bytes between nodes; the simplest of equal ones."""
    parts = ranks // node_size
    return min(
        (FLAT, DEDUP, GATHER), key=lambda name: sizes.expected_bytes(hops_of(name, ranks, node_size), parts)
    )

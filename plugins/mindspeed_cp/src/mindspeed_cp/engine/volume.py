"""Bytes and scores of an attention over a split sequence, from sizes alone: pure arithmetic, no torch.

The numbers are exact: executors that are counted (`mindspeed_cp.engine.counters`) come to the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_cp.engine.counters import ALL_TO_ALL, P2P
from mindspeed_cp.engine.counters import GATHER as GATHERED
from mindspeed_cp.engine.exchange import exchange, needed_rows
from mindspeed_cp.engine.head_plan import HeadPlan, head_plan
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import GATHER, layout_of, outer_layout
from mindspeed_cp.engine.ring_table import ring_table
from mindspeed_cp.options import CPOptions


@dataclass(frozen=True)
class Sizes:
    """One attention on one rank of tensor parallelism.

    Attributes:
        batch: samples of a micro-batch.
        heads: query heads.
        key_heads: key heads, which divide the query heads.
        width: of a query and a key.
        value_width: of a value.
        bytes: of an element.
        gradient_bytes: of an element of travelling gradients of keys and values; 4 or ``bytes``.
    """

    batch: int
    heads: int
    key_heads: int
    width: int
    value_width: int
    bytes: int = 2
    gradient_bytes: int = 4


@dataclass(frozen=True)
class Share:
    """One rank's part of one attention, forward and backward.

    Attributes:
        tokens: positions of the sequence that the rank owns.
        pairs: scores that count, of all samples and one query head of each rank that has them.
        forward: bytes sent in forward, by kind (``p2p``, ``all-to-all``, ``gather``).
        backward: the same in backward.
    """

    tokens: int
    pairs: int
    forward: dict[str, int]
    backward: dict[str, int]

    @property
    def sent(self) -> int:
        """Return the bytes of both."""
        return sum(self.forward.values()) + sum(self.backward.values())


def share_of(
    options: CPOptions, rules: tuple[MaskRule, ...], sizes: Sizes, rank: int, kept: str = "none"
) -> Share:
    """Return what one rank owns, computes and sends.

    Args:
        options: how ranks are arranged, and how they exchange.
        rules: of the samples, one for each or one for all.
        sizes: of the attention.
        rank: within context parallelism.
        kept: see `mindspeed_cp.engine.attention.CallOptions`.
    """
    grid = options.grid
    outer, layout = outer_layout(grid, rules), layout_of(grid, rules)
    place, turn = grid.place(rank)
    samples = sizes.batch if len(rules) == 1 else 1
    pairs = samples * sum(rule.pairs(part) for rule in rules for part in outer.shares[place])
    sent = Counter[str](), Counter[str]()
    key_heads = sizes.key_heads
    if grid.inner > 1:
        first = place * grid.inner
        lengths = layout.lengths[first : first + grid.inner]
        plan = head_plan(sizes.heads, sizes.key_heads, grid.inner, turn)
        key_heads = len(plan.expand) or len(plan.keys[turn])
        again = {"keys": sizes.width, "all": sizes.width + sizes.value_width}
        repeated = again.get(kept, 0) if grid.outer == 1 else 0
        _add_heads(sent, sizes, plan, lengths, turn, repeated, gather_keys=options.gather_keys)
    row = sizes.batch * key_heads * (sizes.width + sizes.value_width)
    if grid.outer > 1 and grid.method == GATHER:
        moved = exchange(outer, place, needed_rows(outer, rules))
        out = sum(len(rows) for target, rows in enumerate(moved.send) if target != place)
        came = sum(rows for source, rows in enumerate(moved.receive) if source != place)
        sent[0][ALL_TO_ALL] += out * row * sizes.bytes
        sent[1][ALL_TO_ALL] += out * row * sizes.bytes + came * row * sizes.gradient_bytes
    elif grid.outer > 1:
        table = ring_table(grid.outer, grid.window)
        there, back = (
            sum(outer.lengths[move.block] for move in moves if move.source == place)
            for moves in (table.moves, table.backward_moves)
        )
        values = sizes.batch * key_heads * sizes.value_width
        keys_again = {"none": row, "keys": values, "all": 0}[kept]
        sent[0][P2P] = there * row * sizes.bytes
        sent[1][P2P] = back * (keys_again * sizes.bytes + row * sizes.gradient_bytes)
    return Share(layout.lengths[rank], pairs, *map(dict, sent))


def _add_heads(
    sent: tuple[Counter[str], Counter[str]],
    sizes: Sizes,
    plan: HeadPlan,
    lengths: Sequence[int],
    turn: int,
    repeated: int,
    *,
    gather_keys: bool,
) -> None:
    """Add exchanges of heads; ``repeated`` is the width of keys and values that backward exchanges again."""
    forward, backward = sent
    own, foreign = lengths[turn], sum(lengths) - lengths[turn]
    own_heads = len(plan.queries[turn])
    both = sizes.width + sizes.value_width
    # Queries go out and results come back; backward does the opposite with their gradients.
    to_heads = own * (sizes.heads - own_heads)
    to_positions = foreign * own_heads
    forward[ALL_TO_ALL] = to_heads * sizes.width + to_positions * sizes.value_width
    backward[ALL_TO_ALL] = to_heads * sizes.value_width + to_positions * sizes.width
    if gather_keys:
        rows = (len(lengths) - 1) * max(lengths) * sizes.key_heads
        forward[GATHERED] = rows * both * sizes.batch * sizes.bytes
        backward[GATHERED] = rows * sizes.batch * (repeated * sizes.bytes + both * sizes.gradient_bytes)
    else:
        out = own * sum(len(keys) for place, keys in enumerate(plan.keys) if place != turn)
        forward[ALL_TO_ALL] += out * both
        backward[ALL_TO_ALL] += out * repeated + foreign * len(plan.keys[turn]) * both
    for counted in sent:
        counted[ALL_TO_ALL] *= sizes.batch * sizes.bytes

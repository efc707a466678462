"""Closed forms of what a layer's linears communicate on a grid of ranks; no torch.

Elements that one rank receives in the forward pass of one layer and micro-batch. A gather of ``n`` elements
over ``r`` ranks, or a sum that is scattered, brings ``(r - 1) / r * n``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_tp.model_sizes import ModelSizes


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a dense layer.

    Attributes:
        tokens: sequence length times micro-batch size, of a context-parallel rank.
        hidden: hidden size.
        feed_forward: width of the feed-forward module.
        gated: its first linear has two halves.
        query: width of all query heads.
        key_value: width of all heads of keys, which is that of values.
        rms: the norms are RMSNorm.
    """

    tokens: int
    hidden: int
    feed_forward: int
    gated: bool
    query: int
    key_value: int
    rms: bool = True

    @classmethod
    def of(cls, args: Any) -> LayerShape:
        """Read the sizes from arguments."""
        sizes = ModelSizes.of(args)
        return cls(
            tokens=sizes.positions * sizes.batch,
            hidden=sizes.hidden,
            feed_forward=sizes.width,
            gated=sizes.gated,
            query=sizes.heads * sizes.channels,
            key_value=sizes.groups * sizes.channels,
            rms=getattr(args, "normalization", "LayerNorm") == "RMSNorm",
        )


def one_dimensional(shape: LayerShape, ranks: int) -> float:
    """Return the elements of a layer cut in one dimension: two gathers and two scattered sums."""
    return 4 * (ranks - 1) / ranks * shape.tokens * shape.hidden


def linears(shape: LayerShape, x: int, y: int) -> float:
    """Return the elements of a layer's four linears and of attention's exchanges on a grid."""
    over_x, over_y = (x - 1) / x, (y - 1) / y
    widths = 2 * shape.query + 2 * shape.key_value
    hidden = 2 * over_x * shape.tokens * shape.hidden / y
    inner = (2 if shape.gated else 1) * shape.feed_forward + shape.feed_forward
    feed_forward = hidden + over_y * shape.tokens * inner / x
    attention = hidden + over_y * shape.tokens * widths / x + over_y * shape.tokens / y * widths / x
    return feed_forward + attention


def norms(shape: LayerShape, x: int, y: int) -> float:
    """Return the float32 numbers of a layer's two norms on a grid."""
    per_row = 2 * (y - 1) / y if shape.rms else 2 * (y - 1)
    return 2 * per_row * shape.tokens / x


def input_gathers(shape: LayerShape, x: int, y: int) -> float:
    """Return the elements that backward gathers once more: the inputs of the four linears."""
    over_x, over_y = (x - 1) / x, (y - 1) / y
    columns = 2 * over_x * shape.tokens * shape.hidden / y
    return columns + over_y * shape.tokens * (shape.query + shape.feed_forward) / x


def grids(ranks: int) -> list[tuple[int, int]]:
    """Return all grids of ranks, the widest x first."""
    return [(x, ranks // x) for x in range(ranks, 0, -1) if ranks % x == 0]


def table(shape: LayerShape, ranks: int) -> list[tuple[int, int, float]]:
    """Return each grid with its volume in units of the hidden state ``tokens * hidden``."""
    unit = shape.tokens * shape.hidden
    return [(x, y, linears(shape, x, y) / unit) for x, y in grids(ranks)]


def in_words(rows: Sequence[tuple[int, int, float]]) -> str:
    """Return a table as one line."""
    return ", ".join(f"{x}x{y} {volume:.3f}" for x, y, volume in rows)

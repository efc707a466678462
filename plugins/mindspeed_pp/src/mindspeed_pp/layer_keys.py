"""Keys of layers in checkpoints that count positions without a layer, as MindSpeed's do."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import count, islice
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedBase
from torch.utils._pytree import tree_iter

_LAYER = re.compile(r"(?<![^.])(decoder\.layers\.)(\d+)(?=\.)")


def positions(layers: int, left_out: Collection[int]) -> list[int]:
    """Return the position of each layer.

    Args:
        layers: of the model.
        left_out: positions that hold none.
    """
    return list(islice((position for position in count() if position not in left_out), layers))


def with_positions(state: Mapping[str, dict[str, Any]], places: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return the sharded state of chunks with each layer under its position.

    Args:
        state: of each chunk, with a key for each layer; the keys of its entries are changed.
        places: position of each layer.
    """
    for entry in tree_iter(dict(state)):
        if isinstance(entry, ShardedBase):
            entry.key = renumbered(entry.key, places)
    return dict(state)


def renumbered(key: str, places: Sequence[int]) -> str:
    """Return the key of a weight with the position of its layer instead of its number."""
    return _LAYER.sub(lambda match: f"{match[1]}{places[int(match[2])]}", key)

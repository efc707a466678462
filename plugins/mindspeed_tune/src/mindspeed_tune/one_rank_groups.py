"""megatron-core's groups of one rank, without listing those of all others.

``initialize_model_parallel`` lists the groups of every rank and keeps those that the current one is in. On
fake groups the others have no use: inside `only_own_groups` the lists hold the groups of this rank alone,
computed from its coordinates. Everything else is megatron-core's own code, so that its global state, the
order of creation and the process-group collection are what they are without it, whether features take their
groups as arguments or from that state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from mindspeed_tune.rank_lists import ranks_along

_JOINED = "tp-ep-pp"


@contextmanager
def only_own_groups(rank: int) -> Iterator[None]:
    """Let megatron-core's rank generators list the groups of one rank only.

    For worlds of fake groups: in a real one every rank takes part in creating every group.
    """
    from megatron.core import parallel_state

    generator: Any = parallel_state.RankGenerator
    original = generator.get_ranks
    asked: Counter[tuple[int, str]] = Counter()

    def get_ranks(self: Any, token: str) -> list[list[int]]:
        position = rank - self.rank_offset
        asked[id(self), token] += 1
        # The second time, these groups are joined to those of an instance of the distributed optimizer.
        joined = token == _JOINED and asked[id(self), token] == 2
        if joined or not 0 <= position < prod(self.ordered_size):
            listed: list[list[int]] = original(self, token)
            return listed
        own = ranks_along(self.ordered_size, self.get_mask(self.order, token), position)
        return [[self.rank_offset + one for one in own]]

    generator.get_ranks = get_ranks
    try:
        yield
    finally:
        generator.get_ranks = original

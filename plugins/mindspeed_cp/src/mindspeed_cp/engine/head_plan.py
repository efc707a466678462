"""The heads that each of the ranks that exchange heads gets: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mindspeed_cp.engine.layout import cut


@dataclass(frozen=True)
class HeadPlan:
    """The heads that each rank gets.

    Attributes:
        queries: query heads of every rank, a range each.
        keys: key heads that those query heads need.
        expand: for each of this rank's query heads the place of its key head among those it got; empty where
            equal numbers of neighbouring query heads share a key head, as kernels take them.
    """

    queries: tuple[range, ...]
    keys: tuple[range, ...]
    expand: tuple[int, ...]


@lru_cache(maxsize=64)
def head_plan(query_heads: int, key_heads: int, ranks: int, rank: int) -> HeadPlan:
    """Split query heads into consecutive ranges, and find the key heads of each.

    Raises:
        ValueError: there are fewer query heads than ranks, or they do not share key heads evenly.
    """
    if query_heads < ranks:
        raise ValueError(f"{query_heads} query heads cannot be split over {ranks} ranks")
    if query_heads % key_heads:
        raise ValueError(f"{query_heads} query heads cannot share {key_heads} key heads evenly")
    share = query_heads // key_heads
    queries = [range(start, end) for start, end in cut(query_heads, ranks)]
    keys = [range(heads.start // share, (heads.stop - 1) // share + 1) for heads in queries]
    own = [head // share - keys[rank].start for head in queries[rank]]
    even = len(own) % len(keys[rank]) == 0
    regular = even and own == [place // (len(own) // len(keys[rank])) for place in range(len(own))]
    return HeadPlan(tuple(queries), tuple(keys), () if regular else tuple(own))

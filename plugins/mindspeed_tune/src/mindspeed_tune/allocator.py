"""Estimate of what a caching allocator takes for a sequence of allocations and releases.

The rules are those of torch's allocator for CUDA, which torch_npu shares: sizes are rounded up to 512 bytes,
tensors of at most 1 MiB come from segments of 2 MiB, others from segments of 20 MiB or, from 10 MiB on, of
their own size rounded to 2 MiB; a free block is split and joined with its neighbours again. Streams other
than the first, and blocks that another stream still holds, are not modelled.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

KIB, MIB = 2**10, 2**20
ROUNDING = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
PAGE = 2 * MIB


@dataclass(frozen=True)
class Estimate:
    """Bytes that the allocator takes.

    Attributes:
        allocated: rounded bytes alive at the peak.
        reserved: bytes of all segments at the end, which is their peak: segments are kept.
    """

    allocated: int
    reserved: int


def rounded(size: int) -> int:
    """Return what an allocation of so many bytes takes."""
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING) if size else 0


def estimate(events: Iterable[tuple[int, int]], *, expandable: bool = False) -> Estimate:
    """Replay allocations and releases.

    Args:
        events: pairs of a tensor's number and its bytes; 0 bytes releases the tensor.
        expandable: segments grow page by page (``expandable_segments:True``), so that free pages between
            tensors are the only waste.
    """
    pools = (_Pool(expandable), _Pool(expandable))
    where: dict[int, tuple[_Pool, _Block]] = {}
    alive = peak = 0
    for number, size in events:
        if size:
            size = rounded(size)
            pool = pools[size > SMALL]
            where[number] = (pool, pool.take(size))
            alive += size
            peak = max(peak, alive)
        elif number in where:
            pool, block = where.pop(number)
            alive -= block.used
            pool.give_back(block)
    return Estimate(peak, sum(pool.reserved for pool in pools))


@dataclass(eq=False)
class _Block:
    """A piece of a segment; neighbours are linked."""

    size: int
    used: int = 0
    before: _Block | None = field(default=None, repr=False)
    after: _Block | None = field(default=None, repr=False)


class _Pool:
    """Free blocks by size, best fit."""

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.reserved = 0
        self._free: list[tuple[int, int, _Block]] = []
        self._end: _Block | None = None

    def take(self, size: int) -> _Block:
        for index, (free, _, block) in enumerate(self._free):
            if free >= size:
                del self._free[index]
                return self._split(block, size)
        return self._split(self._grow(size), size)

    def give_back(self, block: _Block) -> None:
        block.used = 0
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.used:
                self._forget(neighbour)
                block = _join(*((neighbour, block) if neighbour is block.before else (block, neighbour)))
        if block.after is None and self.expandable:
            self._end = block
        self._keep(block)

    def _grow(self, size: int) -> _Block:
        if self.expandable:
            last = self._end
            spare = last.size if last is not None and not last.used else 0
            wanted = -(-(size - spare) // PAGE) * PAGE
            self.reserved += wanted
            if last is not None and spare:
                self._forget(last)
                last.size += wanted
                return last
            grown = _Block(wanted, before=last)
            if last is not None:
                last.after = grown
            self._end = grown
            return grown
        if size <= SMALL:
            segment = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // PAGE) * PAGE
        self.reserved += segment
        return _Block(segment)

    def _split(self, block: _Block, size: int) -> _Block:
        rest = block.size - size
        smallest = ROUNDING if size <= SMALL or self.expandable else SMALL + 1
        if rest >= smallest:
            tail = _Block(rest, before=block, after=block.after)
            if block.after is not None:
                block.after.before = tail
            block.after, block.size = tail, size
            if self._end is block:
                self._end = tail
            self._keep(tail)
        block.used = size
        return block

    def _keep(self, block: _Block) -> None:
        insort(self._free, (block.size, id(block), block), key=lambda one: one[:2])

    def _forget(self, block: _Block) -> None:
        self._free[:] = [one for one in self._free if one[2] is not block]


def _join(first: _Block, second: _Block) -> _Block:
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first

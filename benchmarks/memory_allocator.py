"""Reserve memory for a planned training as torch's caching allocator does, with and without growing segments.

Part f of `memory.py`. The sequence of allocations is that of a dry run; the allocator is a model of torch's
(``c10/cuda/CUDACachingAllocator.cpp``, one stream, default settings): blocks are multiples of 512 bytes,
those up to 1 MiB lie in segments of 2 MiB, others in segments of 20 MiB or, from 10 MiB on, in one of their
own size rounded up to 2 MiB. The smallest free block that is large enough is taken, and what is left of it is
split off. A segment that grows is mapped page by page instead. What is reserved and not allocated is lost.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from memory_optimizer import on_first_rank

from mindspeed_core.activation import activate
from mindspeed_core.feature import hookimpl
from mindspeed_core.hosts.standalone import loop

_MIB = 2**20
_BLOCK, _SMALL, _SMALL_SEGMENT = 512, _MIB, 2 * _MIB
_LARGE_SEGMENT, _OWN_SEGMENT, _ROUND = 20 * _MIB, 10 * _MIB, 2 * _MIB
MODEL = "LLaMA2-7B"


@dataclass(eq=False)
class _Place:
    """A piece of a segment, with its neighbours."""

    start: int
    size: int
    free: bool
    before: _Place | None = None
    behind: _Place | None = None


@dataclass
class _Pool:
    """Segments of one size class.

    Attributes:
        small: of blocks up to 1 MiB.
        growing: one segment that grows.
        reserved: bytes of all segments.
    """

    small: bool
    growing: bool
    reserved: int = 0
    _free: list[tuple[int, int]] = field(default_factory=list)
    _places: dict[int, _Place] = field(default_factory=dict)
    _end: int = 0
    _last: _Place | None = None

    def take(self, size: int) -> _Place:
        """Return a place of ``size`` bytes, a multiple of 512."""
        found = bisect_left(self._free, (size, 0))
        if found < len(self._free):
            place = self._places[self._free.pop(found)[1]]
        else:
            place = self._grow(size) if self.growing else self._segment(size)
        place.free = False
        self._split(place, size)
        return place

    def give(self, place: _Place) -> None:
        """Take a place back, and join it with free neighbours."""
        place.free = True
        for other in (place.before, place.behind):
            if other is not None and other.free:
                self._free.remove((other.size, other.start))
                del self._places[other.start]
                first, second = (other, place) if other is place.before else (place, other)
                place.start, place.size = first.start, first.size + second.size
                place.before, place.behind = first.before, second.behind
                if place.before is not None:
                    place.before.behind = place
                if place.behind is not None:
                    place.behind.before = place
                if self._last is other:
                    self._last = place
        self._add(place)

    def _add(self, place: _Place) -> None:
        self._places[place.start] = place
        insort(self._free, (place.size, place.start))

    def _split(self, place: _Place, size: int) -> None:
        left = place.size - size
        enough = left >= _BLOCK if self.small or self.growing else left > _SMALL
        if not enough:
            return
        rest = _Place(place.start + size, left, True, place, place.behind)
        if place.behind is not None:
            place.behind.before = rest
        place.size, place.behind = size, rest
        if self._last is place:
            self._last = rest
        self._add(rest)

    def _segment(self, size: int) -> _Place:
        whole = _LARGE_SEGMENT if size < _OWN_SEGMENT else _rounded(size, _ROUND)
        whole = _SMALL_SEGMENT if self.small else whole
        place = _Place(self._end, whole, True)
        self._end += whole
        self.reserved += whole
        return place

    def _grow(self, size: int) -> _Place:
        last = self._last
        there = last.size if last is not None and last.free else 0
        more = _rounded(size - there, _SMALL_SEGMENT if self.small else _LARGE_SEGMENT)
        self.reserved += more
        if last is not None and last.free:
            self._free.remove((last.size, last.start))
            last.size += more
        else:
            grown = _Place(self._end, more, True, last)
            if last is not None:
                last.behind = grown
            self._last = last = grown
        self._end += more
        return last


@dataclass
class Allocator:
    """The model of the allocator; keeps the most that was allocated and reserved.

    Attributes:
        growing: segments grow.
        allocated: bytes in use, in blocks.
        most_allocated: its largest value.
    """

    growing: bool
    allocated: int = 0
    most_allocated: int = 0

    def __post_init__(self) -> None:
        """Start with nothing reserved."""
        self._pools = {small: _Pool(small, self.growing) for small in (True, False)}
        self._taken: dict[int, tuple[_Pool, _Place, int]] = {}

    @property
    def reserved(self) -> int:
        """Return bytes of all segments; torch gives none back while there is memory."""
        return sum(pool.reserved for pool in self._pools.values())

    def taken(self, key: int, size: int) -> None:
        """Allocate."""
        size = _rounded(size, _BLOCK)
        if not size:
            return
        pool = self._pools[size <= _SMALL]
        self._taken[key] = pool, pool.take(size), size
        self.allocated += size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def released(self, key: int) -> None:
        """Free."""
        if key in self._taken:
            pool, place, size = self._taken.pop(key)
            self.allocated -= size
            pool.give(place)


class Recording:
    """The sequence of allocations of a run.

    Attributes:
        events: key and bytes, -1 bytes for a release, and whether a pool of what lasts serves it.
    """

    def __init__(self) -> None:
        """Start with nothing; what is built first lasts."""
        self.events: list[tuple[int, int, bool]] = []
        self.lasting = True
        self._updates = 0

    def taken(self, key: int, size: int) -> None:
        """Record an allocation."""
        self.events.append((key, size, self.lasting))

    def released(self, key: int) -> None:
        """Record a release."""
        self.events.append((key, -1, False))

    @hookimpl(wrapper=True)
    def optimizer_step(self) -> Iterator[None]:
        """Let the first update make what lasts: the optimizer's state."""
        self._updates += 1
        self.lasting = self._updates == 1
        result = yield
        self.lasting = False
        return result  # type: ignore[return-value]


def recorded(line: list[str]) -> list[tuple[int, int, bool]]:
    """Plan two steps of one rank; return what it allocated."""
    recording = Recording()
    with activate(line, host="standalone", extra_plugins=[recording]) as session:
        storage: Any = session.platform.storage
        with storage.watched_by(recording):
            run = loop.setup(session)
            recording.lasting = False
            session.call("start_run", run=run)
            for _ in range(2):
                session.call("train_step", run=run)
                run.iteration += 1
                run.consumed_train_samples += run.args.global_batch_size
        loop.teardown(session)
    return recording.events


def replayed(events: Sequence[tuple[int, int, bool]]) -> dict[str, int]:
    """Return the most bytes that were allocated, and those reserved by each kind of segments."""
    fixed, growing = Allocator(growing=False), Allocator(growing=True)
    lasting, passing = Allocator(growing=False), Allocator(growing=False)
    pool_of: dict[int, Allocator] = {}
    for key, size, lasts in events:
        if size >= 0:
            pool_of[key] = lasting if lasts else passing
        for allocator in (fixed, growing, pool_of[key]):
            if size >= 0:
                allocator.taken(key, size)
            else:
                allocator.released(key)
    return {
        "allocated": fixed.most_allocated,
        "fixed": fixed.reserved,
        "growing": growing.reserved,
        "pools": lasting.reserved + passing.reserved,
    }


def reserved_bytes() -> dict[str, Any]:
    """Compare the kinds of segments, without other features and with some that make many sizes."""
    full = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers")
    cases = {
        "plain": (),
        "half of the layers again": (*full, "16"),
        "swapped attention": ("--swap-attention",),
    }
    return {name: replayed(on_first_rank(recorded, MODEL, flags)) for name, flags in cases.items()}


def show_reserved_bytes(found: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{MODEL}, MiB{'':<14}{'allocated':>11}{'fixed':>17}{'growing':>17}{'pools':>17}")
    for name, row in found.items():
        shown = (
            f"{row[kind] / _MIB:>9,.0f} ({row[kind] / row['allocated'] - 1:+.1%})"
            for kind in ("fixed", "growing", "pools")
        )
        print(f"{name:<28}{row['allocated'] / _MIB:>9,.0f}{''.join(shown)}")


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step

"""Storages: who wrote and read which bytes, on which stream, and who may have their memory next."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_testing.lagging.findings import Finding, Frames

if TYPE_CHECKING:
    from mindspeed_testing.lagging.streams import LaggingStream

_EXACT = 1 << 22
"""Bytes up to which the elements of two strided views are compared one by one."""


@dataclass(frozen=True)
class Region:
    """Bytes of a storage.

    Attributes:
        low: first byte.
        high: behind the last one.
        dense: every byte in between belongs to it.
        item: bytes of an element.
        size: of the view.
        stride: of the view, in elements.
    """

    low: int
    high: int
    dense: bool
    item: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Region:
        """Return the bytes of a tensor."""
        item = tensor.element_size()
        return _region(int(tensor.storage_offset()) * item, item, tensor.shape, tensor.stride())

    def overlaps(self, other: Region) -> bool:
        """Return whether they have a byte in common."""
        if self.low >= other.high or other.low >= self.high:
            return False
        low, high = min(self.low, other.low), max(self.high, other.high)
        if (self.dense and other.dense) or high - low > _EXACT:
            return True
        return bool((self._bytes(low, high) & other._bytes(low, high)).any())

    def covers(self, other: Region) -> bool:
        """Return whether every byte of the other one is one of these."""
        return (
            self is other
            or (self.dense and self.low <= other.low and other.high <= self.high)
            or self == other
        )

    def _bytes(self, low: int, high: int) -> Tensor:
        marked = torch.zeros(high - low, dtype=torch.bool)
        shape = (*self.size, self.item)
        marked.as_strided(shape, (*(step * self.item for step in self.stride), 1), self.low - low).fill_(True)
        return marked


@lru_cache(maxsize=1 << 14)
def _region(low: int, item: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Region:
    """Return the bytes of a view; a training asks for few different ones, each many times."""
    if 0 in size:
        return Region(low, low, True, item, (), ())
    count, span = 1, 1
    for length, step in zip(size, stride):
        count *= length
        span += (length - 1) * step
    return Region(low, low + span * item, span == count, item, tuple(size), stride)


@dataclass(eq=False, slots=True)
class Access:
    """One piece of work and the bytes that it touched."""

    stream: LaggingStream
    count: int
    region: Region
    frames: Frames
    operation: str

    def precedes(self, stream: LaggingStream) -> bool:
        """Return whether it is done before the next work of a stream."""
        return stream.known.get(self.stream.number, 0) >= self.count

    def met_by(
        self,
        stream: LaggingStream,
        operation: str,
        frames: Frames,
        waited: Sequence[str],
        *,
        writes: bool,
        wrote: bool,
    ) -> Finding:
        """Return what is reported of a later access that no wait orders after this one.

        Args:
            stream: of the later access.
            operation: of the later access.
            frames: code that the later access comes from.
            waited: names of other streams that did wait.
            writes: the later access writes.
            wrote: this one did.
        """
        elsewhere = f"; {' and '.join(waited)} waited for it, {stream.name} did not" if waited else ""
        does, did = ("writes" if each else "reads" for each in (writes, wrote))
        text = f"{operation} on {stream.name} {does} what {self.operation} on {self.stream.name} {did}"
        rule = "written without a wait" if writes else "read without a wait"
        return Finding(rule, text + elsewhere, frames, self.frames)


@dataclass(eq=False)
class StorageHistory:
    """The accesses of a storage that somebody may still have to wait for.

    Attributes:
        owner: the stream that the memory was taken on, and goes back to; None for memory of the host.
        reference: to the storage.
        recorded: streams that the allocator was told of.
        nbytes: that the allocator counts.
    """

    owner: LaggingStream | None
    reference: weakref.ref[torch.UntypedStorage]
    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    nbytes: int = 0

    def unordered(self, stream: LaggingStream, region: Region, *, writes: bool) -> Access | None:
        """Return an access that a new one of a stream conflicts with.

        Args:
            stream: of the new access.
            region: its bytes.
            writes: it changes them.
        """
        known = stream.known.get
        for access in (*self.writes, *self.reads) if writes else self.writes:
            if known(access.stream.number, 0) < access.count and access.region.overlaps(region):
                return access
        return None

    def add(self, access: Access, *, writes: bool) -> None:
        """Add an access; those that it comes after, and whose bytes it covers, are forgotten."""
        stream, region = access.stream, access.region
        if writes:
            if self.writes:
                self.writes = [a for a in self.writes if not (region.covers(a.region) and a.precedes(stream))]
            if self.reads:
                self.reads = [a for a in self.reads if not (region.covers(a.region) and a.precedes(stream))]
            self.writes.append(access)
        else:
            self.reads = [a for a in self.reads if not (a.stream is stream and region.covers(a.region))]
            self.reads.append(access)

    def in_use(self) -> list[Access]:
        """Return accesses on other streams than the memory's own, of which the allocator was not told."""
        if self.owner is None:
            return []
        return [
            access
            for access in (*self.writes, *self.reads)
            if access.stream is not self.owner and access.stream.number not in self.recorded
        ]

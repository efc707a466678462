"""Follow what is copied back to a device in a step, and say how fast a link must be for nothing to wait.

Copies queue on a stream of their own and begin where the compute stream stands; time is counted in
floating-point operations of matrix products and attention, so that the answer is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

_KEY = "_benchmark_copy"
_STEPS = 40
"""Halvings of the search for a speed."""


class Event(NamedTuple):
    """The beginning of a copy to the device, or the first use of what it brings.

    Attributes:
        key: of the copy.
        nbytes: of the copy; 0 for a use.
        at: operations of the step before it.
    """

    key: int
    nbytes: int
    at: int


class Timeline:
    """The copies of one step."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.events: list[Event] = []
        self.total = 0
        self._counter = FlopCounterMode(display=False)
        self._waiting: set[int] = set()
        self._keys = count()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count operations inside the context."""
        with self._counter:
            yield
        self.total = self._counter.get_total_flops()

    def fetched(self, copy: Any, nbytes: int) -> None:
        """Note that a copy to the device begins."""
        key = next(self._keys)
        # On the object itself: whoever held it would hold its memory.
        setattr(copy, _KEY, key)
        self._waiting.add(key)
        self.events.append(Event(key, nbytes, self._counter.get_total_flops()))

    def used(self, copy: Any) -> None:
        """Note the first use of what a copy brings."""
        key = getattr(copy, _KEY, None)
        if key in self._waiting:
            self._waiting.discard(key)
            self.events.append(Event(key, 0, self._counter.get_total_flops()))

    @property
    def nbytes(self) -> int:
        """Return the bytes that come back in the step."""
        return sum(event.nbytes for event in self.events)

    def waited(self, bytes_per_operation: float) -> float:
        """Return the operations in whose time compute would wait, with a link of this speed."""
        link, waited = 0.0, 0.0
        arrival: dict[int, float] = {}
        for key, nbytes, at in self.events:
            now = at + waited
            if nbytes:
                link = arrival[key] = max(link, now) + nbytes / bytes_per_operation
            else:
                waited += max(0.0, arrival[key] - now)
        return waited

    def needed(self, share: float = 0.01) -> float:
        """Return the least bytes per operation with which compute waits for at most a share of the step."""
        low, high = 1e-9, 1e3
        for _ in range(_STEPS):
            middle = (low * high) ** 0.5
            if self.waited(middle) > share * self.total:
                low = middle
            else:
                high = middle
        return high


@contextmanager
def host_copies_followed(timeline: Timeline) -> Iterator[None]:
    """Follow the copies of mindspeed-memory."""
    from mindspeed_memory.saved.host_copy import HostCopy

    fetch, flat = HostCopy.fetch, HostCopy.flat

    def fetching(copy: HostCopy) -> None:
        was_on_device = copy.is_on_device
        fetch(copy)
        if not was_on_device:
            timeline.fetched(copy, copy._count * copy._dtype.itemsize)

    def using(copy: HostCopy) -> torch.Tensor:
        found = flat(copy)
        timeline.used(copy)
        return found

    with mock.patch.multiple(HostCopy, fetch=fetching, flat=using):
        yield


@contextmanager
def reloads_followed(timeline: Timeline) -> Iterator[None]:
    """Follow the copies of megatron-core."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

    reload, pop = ChunkOffloadHandler.reload, ChunkOffloadHandler.tensor_pop

    def reloading(self: Any, state: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = reload(self, state, *args, **kwargs)
        timeline.fetched(tensor, tensor.numel() * tensor.element_size())
        return tensor

    def popping(self: Any, tag: Any) -> torch.Tensor:
        tensor: torch.Tensor = pop(self, tag)
        timeline.used(tensor)
        return tensor

    with mock.patch.multiple(ChunkOffloadHandler, reload=reloading, tensor_pop=popping):
        yield

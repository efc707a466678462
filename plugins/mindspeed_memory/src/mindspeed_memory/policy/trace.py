"""Recording of one step: which tensors are saved and read when, and how many bytes are alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_memory.policy.tensor_swaps import Life, Place, Trace
from mindspeed_memory.saved.engine import kept_by_its_node

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform

Entry = tuple[str, int, int]
"""``saved`` or ``read``, number of the pass in the step, number of the value in the pass."""


class TraceRecorder:
    """Records one step: bytes, or times, since following tensors takes time itself.

    Attributes:
        order: what was saved and read, one after another.
        groups: the numbers of all values that are saved of one storage in a pass, by its place.
        saved: how many values a pass through each chunk saves that could be swapped.
    """

    def __init__(self, platform: Platform, may: Callable[[Tensor], bool], *, follows: bool) -> None:
        """Start with nothing recorded.

        Args:
            platform: gives events.
            may: whether a tensor could be swapped.
            follows: bytes are followed.
        """
        self.order: list[Entry] = []
        self.groups: dict[Place, list[int]] = {}
        self.saved: dict[int, int] = {}
        self._platform, self._may = platform, may
        self._tracker = platform.step_bytes() if follows else None
        self._samples: list[int] = []
        self._events: list[Any] = []
        self._sizes: dict[Place, int] = {}
        self._chunks: list[int] = []
        self._passes: Counter[int] = Counter()
        self._first: Any = None

    def __enter__(self) -> TraceRecorder:
        """Begin the step."""
        self._first = self._platform.event(enable_timing=True)
        self._first.record()
        self._stack = ExitStack()
        if self._tracker is not None:
            self._stack.enter_context(self._tracker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self._stack.close()

    @contextmanager
    def of_pass(self, chunk: int) -> Iterator[None]:
        """Record what a pass through a chunk saves, and later reads.

        Args:
            chunk: its number.
        """
        number = len(self._chunks)
        self._chunks.append(chunk)
        firsts: dict[int, int] = {}
        count = 0

        def pack(tensor: Tensor) -> Any:
            nonlocal count
            if not self._may(tensor):
                return kept_by_its_node(tensor)
            value, count = count, count + 1
            storage = tensor.untyped_storage()
            place = chunk, firsts.setdefault(storage._cdata, value)
            if value not in self.groups.setdefault(place, []):
                self.groups[place].append(value)
            self._sizes[place] = max(self._sizes.get(place, 0), storage.nbytes())
            self._note("saved", number, value)
            # With its graph it would be held by the node that saves it: a circle that Python does not find.
            return _Traced(tensor.detach(), number, value)

        def unpack(saved: Any) -> Tensor:
            if not isinstance(saved, _Traced):
                tensor: Tensor = saved
                return tensor
            self._note("read", saved.number, saved.value)
            return saved.tensor

        if torch._C._current_graph_task_id() != -1:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self.saved[chunk] = count

    def _note(self, kind: str, number: int, value: int) -> None:
        self.order.append((kind, number, value))
        if self._tracker is not None:
            self._samples.append(self._tracker.peak)
            self._tracker.reset_peak()
            return
        event = self._platform.event(enable_timing=True)
        event.record()
        self._events.append(event)

    def trace(self, times: TraceRecorder) -> Trace:
        """Join the bytes of this step and the times of another one that saved and read the same.

        Args:
            times: of the other step.
        """
        self._platform.synchronize()
        seconds = [times._first.elapsed_time(event) / 1e3 for event in times._events]
        saved: dict[tuple[int, int], float] = {}
        read: dict[tuple[int, int], float] = {}
        for (kind, number, value), second in zip(self.order, seconds):
            if kind == "saved":
                saved[number, value] = second
            else:
                read.setdefault((number, value), second)
        lives = []
        for number, chunk in enumerate(self._chunks):
            for place, values in self.groups.items():
                if place[0] != chunk:
                    continue
                needed = [read[number, value] for value in values if (number, value) in read]
                begun = [saved[number, value] for value in values if (number, value) in saved]
                if needed and begun:
                    lives.append(Life(place, self._sizes[place], max(begun), min(needed)))
        return Trace(tuple(lives), tuple(zip(seconds, self._samples)))


class _Traced:
    """A saved tensor and its number."""

    def __init__(self, tensor: Tensor, number: int, value: int) -> None:
        self.tensor, self.number, self.value = tensor, number, value

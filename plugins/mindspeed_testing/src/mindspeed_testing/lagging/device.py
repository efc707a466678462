"""The lagging device: follows every operation, orders it by its stream, and holds results back until a wait.

An operation of a side stream runs at once, on what its inputs are then, and its result is put aside: whoever
looks before a wait sees NaN. An access that no wait orders after the one before it, in whichever direction,
is a finding: on an accelerator the two may come in either order. Work whose inputs were changed or freed
under it leaves NaN for good.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
    _push_mode,
)

from mindspeed_testing.lagging.findings import OF_LAUNCHES, Findings, Frames, calling_frames
from mindspeed_testing.lagging.forms import COPIES, Form, form_of, non_blocking
from mindspeed_testing.lagging.freed import FreedMemory
from mindspeed_testing.lagging.held_back import HeldBack
from mindspeed_testing.lagging.launching import Launching
from mindspeed_testing.lagging.memory import Access, Region, StorageHistory
from mindspeed_testing.lagging.streams import LaggingEvent, LaggingHost, LaggingStream
from mindspeed_testing.lagging.values import poison, poison_floats, strided

_UNWRITTEN = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"})
_READS_ON_HOST = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"})


class LaggingDevice(TorchDispatchMode):
    """The state of one process's device.

    Attributes:
        host: the program itself, as a stream.
        main: the default stream.
        findings: what was found so far.
        operations: how many were followed.
        allocated: bytes of tensors made since it started.
        peak: the most of them since `reset_peak`.
    """

    def __init__(self) -> None:
        """Start idle."""
        super().__init__()
        self.findings = Findings()
        self.operations = 0
        self.allocated = self.peak = 0
        self._streams: list[LaggingStream] = []
        self.host = LaggingHost(self, 0)
        self._streams.append(self.host)
        self.main = self._new_stream("the default stream")
        self._launching = Launching(self.main)
        self._storages: dict[int, StorageHistory] = {}
        self._held = HeldBack()
        self._freed = FreedMemory()
        self._host_keys: set[int] = set()
        self._open = False
        self.communication: Any = None

    @property
    def running(self) -> bool:
        """Return whether operations are followed."""
        return self._open

    @property
    def queued(self) -> int:
        """Return how many results were held back until a wait."""
        return self._held.added

    # Streams.

    def _new_stream(self, name: str, priority: int = 0) -> LaggingStream:
        stream = LaggingStream(self, len(self._streams), name, priority)
        self._streams.append(stream)
        return stream

    def stream(self, name: str = "", priority: int = 0) -> LaggingStream:
        """Make a side stream, named after the line that asks for it by default."""
        if not name:
            frames = calling_frames()
            code, line = frames[0] if frames else (None, 0)
            name = f"the stream of {code.co_filename.rsplit('/', 1)[-1]}:{line}" if code else "a side stream"
        return self._new_stream(name, priority)

    def event(self, enable_timing: bool = False) -> LaggingEvent:
        """Make an event."""
        return LaggingEvent(self, enable_timing)

    def current(self) -> LaggingStream:
        """Return the stream that this thread launches on."""
        return self._launching.current()

    def enter(self, stream: LaggingStream) -> None:
        """Let this thread launch on a stream, until `leave`."""
        self._launching.enter(stream)

    def leave(self) -> None:
        """Let this thread launch where it did before."""
        self._launching.leave()

    def set_stream(self, stream: LaggingStream) -> None:
        """Let this thread launch on a stream from now on."""
        self._launching.choose(stream)

    @contextmanager
    def on(self, stream: Any) -> Iterator[Any]:
        """Launch on a stream inside the context; None changes nothing."""
        if not isinstance(stream, LaggingStream):
            yield stream
            return
        self.enter(stream)
        try:
            yield stream
        finally:
            self.leave()

    def synchronize(self) -> None:
        """Let the host, and with it everything launched later, wait for all streams."""
        self.host.wait({stream.number: stream.count for stream in self._streams})

    # Results that are held back.

    def settle(self, stream: LaggingStream) -> None:
        """Put results in place that a stream has waited for."""
        self._held.settle(stream)

    def prepare(self, tensors: Sequence[Tensor], stream: LaggingStream) -> None:
        """Put results in place that a stream is about to read and may know."""
        if self._held:
            self._held.settle_own(stream, {tensor.untyped_storage()._cdata for tensor in tensors})

    def hold_back(
        self,
        tensor: Tensor,
        stream: LaggingStream,
        count: int,
        value: Tensor | None = None,
        work: Any = None,
    ) -> None:
        """Let a tensor read as NaN until somebody waits for a piece of work.

        Args:
            tensor: the place.
            stream: that writes it.
            count: number of the work.
            value: what will be there; by default what is there now.
            work: of a backend that fills ``value``.
        """
        self._held.add(tensor, stream, count, value, work)

    # Storages.

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self.peak = self.allocated

    def _count(self, history: StorageHistory, nbytes: int) -> None:
        self.allocated += nbytes - history.nbytes
        history.nbytes = nbytes
        self.peak = max(self.peak, self.allocated)

    def history(self, storage: torch.UntypedStorage, owner: LaggingStream | None) -> StorageHistory:
        """Return the history of a storage, which begins now where it is not known."""
        key = storage._cdata
        found = self._storages.get(key)
        if found is None or found.reference() is not storage:
            if key in self._host_keys:
                owner = None
            found = StorageHistory(owner, weakref.ref(storage, lambda _: self._died(key)))
            self._storages[key] = found
        return found

    def pin(self, tensor: Tensor) -> Tensor:
        """Make a tensor memory of the host that copies run to and from asynchronously."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._host_keys.add(key)
        self._storages[key] = StorageHistory(None, weakref.ref(storage, lambda _: self._died(key)))
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is memory of the host."""
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._host_keys

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Tell the allocator that a stream uses a tensor's memory."""
        if isinstance(stream, LaggingStream):
            self.history(tensor.untyped_storage(), self.main).recorded.add(stream.number)

    def _died(self, key: int) -> None:
        history = self._storages.pop(key, None)
        self._host_keys.discard(key)
        if history is not None:
            self._count(history, 0)
            if self._open:
                self._freed.add(history, "freed while in use")

    def resized(self, storage: torch.UntypedStorage, nbytes: int, *, smaller: bool) -> None:
        """Take note of memory that is given back, or taken again, while the storage lives on."""
        history = self._storages.get(storage._cdata)
        if history is None or history.reference() is not storage:
            return
        self._count(history, nbytes)
        if smaller:
            self._freed.add(history, "emptied while in use")
            history.writes.clear()
            history.reads.clear()

    # Accesses.

    def touch(
        self,
        stream: LaggingStream,
        count: int,
        operation: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        fresh: Sequence[Tensor] = (),
    ) -> bool:
        """Check the accesses of a piece of work against all before it, and remember them.

        Returns:
            Whether it reads what may not be there yet.
        """
        frames = calling_frames(OF_LAUNCHES)
        early = False
        for tensor in reads:
            early |= self._touch(tensor, stream, count, operation, frames, writes=False)
        for tensor in writes:
            self._touch(tensor, stream, count, operation, frames, writes=True)
        for tensor in fresh:
            storage = tensor.untyped_storage()
            history = self.history(storage, None if stream is self.host else stream)
            history.add(Access(stream, count, Region.of(tensor), frames, operation), writes=True)
            if history.owner is not None and not history.nbytes:
                self._count(history, storage.nbytes())
        return early

    def _touch(
        self,
        tensor: Tensor,
        stream: LaggingStream,
        count: int,
        operation: str,
        frames: Frames,
        *,
        writes: bool,
    ) -> bool:
        history = self.history(tensor.untyped_storage(), self.main)
        region = Region.of(tensor)
        before = history.unordered(stream, region, writes=writes)
        found = before is not None and not (before.stream is stream and before.count == count)
        if before is not None and found:
            self._conflict(before, stream, operation, writes=writes, wrote=before in history.writes)
        history.add(Access(stream, count, region, frames, operation), writes=writes)
        return found

    def _conflict(
        self,
        before: Access,
        stream: LaggingStream,
        operation: str,
        *,
        writes: bool,
        wrote: bool,
    ) -> None:
        waited = [
            other.name
            for other in self._streams
            if other not in (stream, before.stream) and other.knows(before.stream.number, before.count)
        ]
        frames = calling_frames()
        self.findings.add(before.met_by(stream, operation, frames, waited, writes=writes, wrote=wrote))
        if writes and not wrote:
            self._held.spoil(before)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled under a mode; torch would guard every operation against it.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation as one of the current stream, or of the host."""
        kwargs = kwargs or {}
        form = form_of(func)
        if form.is_python:
            return self._in_parts(func, args, kwargs)
        if form.passes:
            return func(*args, **kwargs)
        self.operations += 1
        read = strided((args, kwargs)) if kwargs else strided(args)
        written: list[Tensor] = []
        if form.places:
            written = strided(form.written(args, kwargs))
            written_ids = {id(tensor) for tensor in written}
            read = [tensor for tensor in read if id(tensor) not in written_ids]
        stream, on_host, host_copy = self._place(form, read, written, non_blocking(form, args, kwargs))
        count = stream.launch()
        keys = {tensor.untyped_storage()._cdata for tensor in (*read, *written)}
        if self._held:
            self._held.settle_own(stream, keys)
        result = func(*args, **kwargs)
        fresh = [tensor for tensor in strided(result) if tensor.untyped_storage()._cdata not in keys]
        if fresh and self._freed:
            for finding, access in self._freed.taken(stream):
                self.findings.add(finding)
                self._held.spoil(access)
        if self.touch(stream, count, form.name, read if form.reads else (), written, fresh):
            # Another stream has waited for what they are computed of, theirs did not.
            poison_floats((*written, *fresh))
        if on_host:
            for tensor in fresh:
                self._host_keys.add(tensor.untyped_storage()._cdata)
                self.history(tensor.untyped_storage(), None).owner = None
        if form.name in _UNWRITTEN:
            for tensor in fresh:
                poison(tensor)
        side = stream is not self.main and stream is not self.host
        if side:
            self._launching.note_node(stream)
        if (side or host_copy) and form.name not in _UNWRITTEN:
            results = (*written, *fresh)
            for tensor in results if side else filter(self.is_pinned, results):
                self.hold_back(tensor, stream, count)
        copies = form.name in COPIES and not host_copy and self._crosses(read, written or fresh)
        if copies or form.name in _READS_ON_HOST:
            self.host.wait(stream.known)
        return result

    def _place(
        self, form: Form, read: Sequence[Tensor], written: Sequence[Tensor], without_blocking: bool
    ) -> tuple[LaggingStream, bool, bool]:
        """Return the stream of an operation, whether the host computes it, and whether it copies from it."""
        if not self._host_keys or not (touched := (*read, *written)):
            return self.current(), False, False
        pinned = [self.is_pinned(tensor) for tensor in touched]
        if all(pinned):
            return self.host, True, False
        crosses = form.name in COPIES and any(pinned)
        return self.current(), False, crosses and without_blocking

    def _crosses(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
        kinds = {self.is_pinned(tensor) for tensor in (*read, *written)}
        return len(kinds) == 2

    def _in_parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that Python defines, and follow the operations that it consists of."""
        with self:
            return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)

    # Its time.

    def start(self) -> None:
        """Follow operations of this thread from now on."""
        self._open = True
        original = torch.UntypedStorage.resize_
        self._resize = vars(torch.UntypedStorage).get("resize_")
        device = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            device.resized(storage, size, smaller=size < storage.nbytes())
            return original(storage, size)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self.__enter__()

    def stop(self) -> None:
        """Follow them no more; everything that waits is done."""
        if not self._open:
            return
        above = []
        while _get_current_dispatch_mode() not in (self, None):
            above.append(_pop_mode())
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)
        for mode in reversed(above):
            _push_mode(mode)
        # A backend that never ends must not hold the end of a run that has failed.
        self._held.drop_unfinished()
        self.synchronize()
        self._open = False
        if self._resize is None:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._storages.clear()
        self._freed.clear()
        self._launching.clear()
        self._host_keys.clear()

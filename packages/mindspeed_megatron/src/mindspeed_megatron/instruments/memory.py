"""Exact bytes of tensors: alive, peak, and by kind.

Process memory says little about a device allocator. Here every storage is followed from the operation that
creates it until it is freed, which gives the same numbers on every machine and lets tests assert formulas.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
    _push_mode,
)

if TYPE_CHECKING:
    from types import TracebackType


DEVICE = torch.ops.prim.device.default
"""Asks a tensor of a subclass for its device, more often than everything else together."""
_FRESH = torch.ops.aten.lift_fresh.default
"""Takes over a tensor that was made outside of every mode, from a list of numbers for instance."""


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of storages created inside the context, including by backward.

    What existed before does not count, except that growing or shrinking such a storage
    (``untyped_storage().resize_``, how swapping and re-gathering features free memory) changes ``alive``.
    Costs 10 to 20 µs per operation: for measurement, not for training.

    Attributes:
        alive: bytes alive now, relative to the start.
        peak: largest value of ``alive`` since the start or the last `reset_peak`.
    """

    def __init__(self) -> None:
        """Start with nothing alive."""
        super().__init__()
        self.alive = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._foreign: dict[int, weakref.finalize[Any, Any]] = {}
        self._finalizers: dict[int, weakref.finalize[Any, Any]] = {}
        self._paused = 0
        self._closed = False
        self._resize: Any = None

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        self.peak = self.alive

    @property
    def is_paused(self) -> bool:
        """Return whether what is created now is left out."""
        return self._paused > 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is created inside the context: what the measurement itself allocates."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __enter__(self) -> TensorBytes:
        """Begin to follow storages."""
        super().__enter__()
        original = torch.UntypedStorage.resize_
        self._resize = vars(torch.UntypedStorage).get("resize_")
        tracker = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = original(storage, size)
            tracker._resized(storage, storage.nbytes() - before)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; ``alive`` and ``peak`` keep their last values."""
        if self._resize is None:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._closed = True
        for finalizer in (*self._finalizers.values(), *self._foreign.values()):
            finalizer.detach()
        super().__exit__(kind, error, trace)

    def start(self) -> None:
        """Follow storages from now on, outside of any block."""
        self.__enter__()

    def stop(self) -> None:
        """Follow them no more; what was counted stays."""
        # Modes that were entered since and have not been left stay as they are.
        above = []
        while _get_current_dispatch_mode() not in (self, None):
            above.append(_pop_mode())
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)
        for mode in reversed(above):
            _push_mode(mode)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and follow the storages it created."""
        if func is DEVICE:
            return device_of(args[0])
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        for tensor in () if func is _FRESH else _strided((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes:
                self._met(storage, tensor)
        result = func(*args, **kwargs)
        for tensor in _strided(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._sizes and key not in self._foreign:
                self._follow(storage, tensor)
        return result

    def made(self, tensors: Iterable[torch.Tensor]) -> None:
        """Follow the storages of tensors that were made out of sight."""
        for tensor in tensors:
            self._follow(tensor.untyped_storage(), tensor)

    def _follow(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        self._allocated(storage, tensor)
        self._finalizers[storage._cdata] = weakref.finalize(storage, self._freed, storage._cdata)

    def _met(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        """Take note of an argument that no operation made: it existed before."""
        self._ignore(storage)

    def _ignore(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._foreign:
            self._foreign[key] = weakref.finalize(storage, self._foreign.pop, key, None)

    def _allocated(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        self._sizes[storage._cdata] = storage.nbytes()
        self._change(storage.nbytes())

    def _change(self, amount: int) -> None:
        self.alive += amount
        # Threads of a backend free tensors too: they must not write back a peak read before.
        if self.alive > self.peak:
            self.peak = self.alive

    def _freed(self, key: int) -> None:
        if not self._closed:
            del self._finalizers[key]
            self._change(-self._sizes.pop(key))

    def _resized(self, storage: torch.UntypedStorage, amount: int) -> None:
        if self._paused:
            return
        if storage._cdata in self._sizes:
            self._sizes[storage._cdata] += amount
        else:
            self._ignore(storage)
        self._change(amount)


def device_of(tensor: Any) -> Any:
    """Answer `DEVICE` as the tensor itself does: no mode below has anything to add."""
    return type(tensor).__torch_dispatch__(DEVICE, (type(tensor),), (tensor,), {})


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the bytes of the distinct storages behind tensors; views and shared buffers count once."""
    return sum(storage_bytes(tensors).values())


def storage_bytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each distinct storage behind tensors, by the storage's identity."""
    return {storage._cdata: storage.nbytes() for storage in _storages(list(tensors))}


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments or results of an operator: single, in lists, in dictionaries."""
    # Much faster than a general tree.
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, (list, tuple, dict)):
                yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in _strided(values))


def _strided(values: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_in(values) if tensor.layout is torch.strided)

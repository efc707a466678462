"""Tensors of one micro-batch that wait on the host: activations until backward, operands until ``W``.

Copies run on streams of their own, so that computation goes on. A tensor on the device is let go when its
copy to the host is done; autograd keeps a `Kept` in its place, never a storage that was emptied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mindspeed_megatron.dropped_storages import will_be_dropped

Place = tuple[int, int]
SMALLEST = 4096
"""Bytes below which an activation stays where it is: a copy would cost more than it frees."""


class HostCopies:
    """Copies to the host and back, and the buffers there.

    Attributes:
        moved: bytes that went to the host so far.
        away_now: bytes that are on the host and not on the device.
    """

    def __init__(self, platform: Any) -> None:
        """Make the streams."""
        self.platform = platform
        self.out, self.back = platform.stream(), platform.stream()
        self.moved = self.away_now = 0
        self._free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)

    def take(self, size: int) -> Tensor:
        """Return a host buffer of so many bytes; one that was used before, where its last copy is done."""
        if self._free[size]:
            buffer, read = self._free[size].pop()
            self.out.wait_event(read)
            return buffer
        buffer = self.platform.pinned_empty((size,), torch.uint8)
        assert isinstance(buffer, Tensor)
        return buffer

    def give(self, buffer: Tensor, read: Any) -> None:
        """Take a buffer back that is free once an event has come."""
        self._free[buffer.numel()].append((buffer, read))


class Kept:
    """One tensor of a micro-batch, on the device or on the host."""

    def __init__(self, copies: HostCopies, tensor: Tensor) -> None:
        """Keep a tensor where it is."""
        self._copies, self._tensor = copies, tensor
        self._host: Tensor | None = None
        self._event: Any = None
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self.bytes = tensor.numel() * tensor.element_size()

    def leave(self) -> None:
        """Begin to copy to the host, and let go of the tensor."""
        tensor, copies = self._tensor, self._copies
        assert tensor is not None
        assert self._host is None
        platform = copies.platform
        self._host = copies.take(self.bytes)
        copies.out.wait_stream(platform.current_stream())
        with platform.use_stream(copies.out):
            self._host.view(self._dtype).view(self._shape).copy_(tensor, non_blocking=True)
        # What is computed from now on may get this memory, and comes after the copy.
        platform.current_stream().wait_event(copies.out.record_event())
        self._tensor = None  # type: ignore[assignment]
        copies.moved += self.bytes
        copies.away_now += self.bytes

    def come(self) -> None:
        """Begin to copy back; nothing where the tensor is here."""
        if self._host is None:
            return
        copies, platform = self._copies, self._copies.platform
        # On the compute stream: memory of another stream could be given away before it was read.
        tensor = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=self._device)
        copies.back.wait_stream(platform.current_stream())
        copies.back.wait_stream(copies.out)
        with platform.use_stream(copies.back):
            tensor.copy_(self._host.view(self._dtype).view(self._shape), non_blocking=True)
        self._event = copies.back.record_event()
        copies.give(self._host, self._event)
        self._tensor, self._host = tensor, None
        copies.away_now -= self.bytes

    def tensor(self) -> Tensor:
        """Return the tensor; whoever reads it on the compute stream waits for the copy."""
        self.come()
        if self._event is not None:
            self._copies.platform.current_stream().wait_event(self._event)
            self._event = None
        return self._tensor


class Activations:
    """Tensors that autograd keeps of the forward passes that go to the host."""

    def __init__(self, copies: HostCopies) -> None:
        """Begin with nothing."""
        self._copies = copies
        self._kept: dict[Place, dict[tuple[Any, ...], Kept]] = {}

    @contextmanager
    def of(self, place: Place, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Keep what forward passes in this block save for backward.

        Args:
            place: stage and micro-batch.
            parameters: that stay on the device, and whatever shares their memory.
        """
        staying = {_storage(parameter) for parameter in parameters}
        found = self._kept.setdefault(place, {})

        def pack(tensor: Tensor) -> Tensor | Kept:
            small = tensor.numel() * tensor.element_size() < SMALLEST
            dense = torch._debug_has_internal_overlap(tensor) == 0
            if small or not dense or isinstance(tensor, torch.nn.Parameter) or _storage(tensor) in staying:
                return tensor
            # Its owner empties it before it would leave, and fills it before it is read.
            if will_be_dropped(tensor):
                return tensor
            key = _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
            if key not in found:
                found[key] = Kept(self._copies, tensor.detach())
            return found[key]

        def unpack(packed: Tensor | Kept) -> Tensor:
            return packed.tensor() if isinstance(packed, Kept) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def leave(self, place: Place) -> None:
        """Bring them to the host."""
        for kept in self._kept[place].values():
            kept.leave()

    def come(self, place: Place) -> None:
        """Bring them back."""
        for kept in self._kept.pop(place).values():
            kept.come()

    def left(self) -> list[Place]:
        """Return the places that are not back."""
        return list(self._kept)


def _storage(tensor: Tensor) -> int:
    # Of tensors without memory too, where data_ptr() is no identity.
    return int(tensor.untyped_storage()._cdata)

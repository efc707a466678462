"""Places where the state of the optimizer lives between steps, and the windows in which a step takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from mindspeed_megatron.described_optimizer import MOMENTS
from mindspeed_memory.optim.exponent_codec import decode, encode
from mindspeed_memory.optim.transfers import Transfers

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform
    from mindspeed_megatron.parameter_parts import ParameterPart

    Part = ParameterPart | None

_ITEM = 4
_SHARES = 16
"""Windows at least, so that what is made for one is small beside a small model too."""
CHUNK = 2**18
"""Numbers that are compressed together."""
BLOCK = 2**24
"""Most elements of a window where state lies on the device: what is made for one is small beside a model."""


class Kept(Protocol):
    """Float32 numbers of one parameter, in any form; a named tuple, so that measurements find its tensors."""

    def whole(self) -> torch.Tensor:
        """Return all numbers, flat; not to be changed."""

    def put(self, values: torch.Tensor) -> None:
        """Overwrite all numbers, from flat ones of any dtype and device."""

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return the numbers of a range on the device, which may be changed."""

    def give(self, start: int, stop: int, values: torch.Tensor, step: int) -> None:
        """Take back the numbers that `take` returned, changed in the update of that number, from 1."""


class Plain(NamedTuple):
    """Numbers as they are, on the device or in a buffer of the host that is copied from asynchronously."""

    tensor: torch.Tensor
    on_host: bool = False

    def whole(self) -> torch.Tensor:
        """Return all numbers, flat, where they lie; not to be changed."""
        return self.tensor

    def put(self, values: torch.Tensor) -> None:
        """Overwrite all numbers, from flat ones of any dtype and device."""
        self.tensor.copy_(values)

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return the numbers of a range in place."""
        return self.tensor[start:stop]

    def give(self, start: int, stop: int, values: torch.Tensor, step: int) -> None:
        """Do nothing: they were changed in place."""


class Compressed(NamedTuple):
    """Numbers on the device of the parameter, in parts that are compressed each by itself."""

    parts: list[torch.Tensor]
    size: int
    chunk: int

    def whole(self) -> torch.Tensor:
        """Return all numbers, flat."""
        return self.take(0, self.size)

    def put(self, values: torch.Tensor) -> None:
        """Overwrite all numbers, from flat ones of any dtype and device."""
        for index, part in enumerate(values.split(self.chunk)):
            self.parts[index] = encode(part.to(self.parts[index].device, torch.float32))

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return the numbers of a range that begins with a part and ends with one."""
        result = torch.empty(stop - start, dtype=torch.float32, device=self.parts[0].device)
        for index, part in enumerate(result.split(self.chunk), start // self.chunk):
            decode(self.parts[index], part)
        return result

    def give(self, start: int, stop: int, values: torch.Tensor, step: int) -> None:
        """Compress the numbers that `take` returned, changed."""
        for index, part in enumerate(values.split(self.chunk), start // self.chunk):
            self.parts[index] = encode(part)


class Device:
    """The device, as with megatron-core's own optimizer.

    Attributes:
        align: parameters are cut at multiples of so many of their elements.
        along_parameter: elements are those of the model's parameter, and not of the part that this rank has.
        block: the most elements for which temporary tensors are made.
        deferred: copies back to the host may end after the step.
    """

    align = 1
    along_parameter = False
    deferred = False

    def __init__(self, platform: Platform, block: int = BLOCK) -> None:
        """Take the most elements of a window."""
        self.platform = platform
        self.block = block

    def zeros(self, name: str, size: int, device: torch.device, part: Part = None) -> Kept:
        """Return zeros for the state of a parameter.

        Args:
            name: the kind of state.
            size: how many.
            device: that of the parameter.
            part: where they lie in the model's parameter; None where that is not known.
        """
        return Plain(torch.zeros(size, dtype=torch.float32, device=device))

    def adopted(self, name: str, tensor: torch.Tensor) -> Kept | None:
        """Return a flat tensor of the device as what is kept; None where it is kept elsewhere."""
        return Plain(tensor)

    def window(self, elements: int) -> int:
        """Return the elements of a window of an optimizer with so many."""
        return max(self.align, min(self.block, -(-elements // _SHARES)))

    def batch(self, elements: int) -> int:
        """Return how many elements of a window are updated at a time."""
        return self.block

    def transfers(self, device: torch.device) -> Transfers:
        """Return what copies windows between host and device."""
        return Transfers(self.platform, device)


class Host(Device):
    """The host, for everything."""

    def __init__(self, platform: Platform, times: int, block: int = BLOCK) -> None:
        """Take the number of windows of a step; 0 for one, whose copies back end after the step."""
        super().__init__(platform, block)
        self._times = times
        self.deferred = times == 0

    def zeros(self, name: str, size: int, device: torch.device, part: Part = None) -> Kept:
        """Return zeros in a buffer of the host."""
        return Plain(self.platform.pinned_empty((size,), torch.float32).zero_(), on_host=True)

    def adopted(self, name: str, tensor: torch.Tensor) -> Kept | None:
        """Return nothing: what is on the device is copied."""
        return None

    def window(self, elements: int) -> int:
        """Return a share of the elements, for each of the windows."""
        return max(1, -(-elements // max(self._times, 1)))

    def batch(self, elements: int) -> int:
        """Return half a window: what is made beside its two buffers stays below a third one."""
        return min(self.block, max(1, -(-elements // 2)))


class Budget(Host):
    """The host for moments, tensor by tensor as far as a number of bytes goes; the device for the rest.

    Attributes:
        left: bytes of the budget that are left.
    """

    def __init__(self, platform: Platform, budget: int, times: int = 16, block: int = BLOCK) -> None:
        """Take the bytes."""
        super().__init__(platform, times, block)
        self.left = budget

    def zeros(self, name: str, size: int, device: torch.device, part: Part = None) -> Kept:
        """Return zeros on the host, where the budget allows it and a moment is asked for."""
        if name not in MOMENTS or size * _ITEM > self.left:
            return Plain(torch.zeros(size, dtype=torch.float32, device=device))
        self.left -= size * _ITEM
        return super().zeros(name, size, device)

    def adopted(self, name: str, tensor: torch.Tensor) -> Kept | None:
        """Return a flat tensor of the device as what is kept."""
        return Plain(tensor)


class Compressor(Device):
    """The device, with moments that are compressed between steps."""

    align = CHUNK

    def zeros(self, name: str, size: int, device: torch.device, part: Part = None) -> Kept:
        """Return zeros; those of a moment are compressed."""
        if name not in MOMENTS:
            return super().zeros(name, size, device)
        zeros = torch.zeros(size, dtype=torch.float32, device=device)
        return Compressed([encode(part) for part in zeros.split(CHUNK)], size, CHUNK)

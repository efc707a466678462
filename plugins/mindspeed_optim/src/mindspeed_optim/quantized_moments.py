"""Adam's moments in 8 or 16 bits, as a place of mindspeed-memory's block-wise AdamW.

A window of a moment is made float32, updated, and rounded back stochastically (`stochastic_rounding`).
The second moment has 8 bits as its square root: squares of gradients span twice as many powers of two, and
those that a format does not resolve would divide by zero.
"""

from __future__ import annotations

from argparse import Namespace
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_core import ParameterPart
from mindspeed_core.platforms.platform import Platform
from mindspeed_megatron.described_optimizer import MOMENTS
from mindspeed_memory.optim.places import Device, Kept
from mindspeed_optim.float_blocks import BLOCK, E4M3, E4M3_ROOT, BlockFloats
from mindspeed_optim.quantized_formats import FP8
from mindspeed_optim.stochastic_rounding import Place, key_of, random_bits, rounded_to_bfloat16


class Float8Moment(NamedTuple):
    """A moment in blocks of e4m3.

    Attributes:
        kept: the numbers, or their roots.
        place: where the numbers lie in the whole parameter.
        stream: the moment, as a number.
        root: it is the second moment.
    """

    kept: BlockFloats
    place: Place
    stream: int
    root: bool

    def whole(self) -> Tensor:
        """Return all numbers, flat, in memory of their own."""
        return self._squared(self.kept.whole())

    def put(self, values: Tensor) -> None:
        """Overwrite all numbers, rounded to nearest."""
        for start, stop in self.kept.ranges():
            self._write(start, stop, values[start:stop].to(self.kept.numbers.device, torch.float32), None)

    def take(self, start: int, stop: int) -> Tensor:
        """Return the numbers of a range of whole blocks."""
        return self._squared(self.kept.read(start, stop))

    def give(self, start: int, stop: int, values: Tensor, step: int) -> None:
        """Take back the numbers that `take` returned, changed, and round them stochastically."""
        bits = random_bits(key_of(step, self.stream), self.place.elements(start, stop, values.device))
        self._write(start, stop, values, bits)

    def _squared(self, values: Tensor) -> Tensor:
        return values.square_() if self.root else values

    def _write(self, start: int, stop: int, values: Tensor, bits: Tensor | None) -> None:
        if not self.root:
            self.kept.write(start, stop, values, bits)
            return
        self.kept.write(start, stop, values.sqrt(), bits)
        # A second moment that was there stays above zero.
        codes = self.kept.numbers[start:stop]
        codes += (codes == 0) & (values > 0)


class BFloat16Moment(NamedTuple):
    """A moment in bfloat16.

    Attributes:
        numbers: bfloat16 ``[n]``.
        place: where the numbers lie in the whole parameter.
        stream: the moment, as a number.
    """

    numbers: Tensor
    place: Place
    stream: int

    def whole(self) -> Tensor:
        """Return all numbers, flat, in memory of their own."""
        return self.numbers.float()

    def put(self, values: Tensor) -> None:
        """Overwrite all numbers, rounded to nearest."""
        self.numbers.copy_(values)

    def take(self, start: int, stop: int) -> Tensor:
        """Return the numbers of a range."""
        return self.numbers[start:stop].float()

    def give(self, start: int, stop: int, values: Tensor, step: int) -> None:
        """Take back the numbers that `take` returned, changed, and round them stochastically."""
        bits = random_bits(key_of(step, self.stream), self.place.elements(start, stop, values.device))
        self.numbers[start:stop].copy_(rounded_to_bfloat16(values, bits))


class QuantizedMoments(Device):
    """The device, with moments of 8 or 16 bits."""

    align = BLOCK
    along_parameter = True

    def __init__(self, platform: Platform, form: str) -> None:
        """Take the format, `FP8` or `BF16`."""
        super().__init__(platform)
        self._form = form

    def zeros(self, name: str, size: int, device: torch.device, part: ParameterPart | None = None) -> Kept:
        """Return zeros; those of a moment are quantised."""
        if name not in MOMENTS:
            return super().zeros(name, size, device, part)
        stream, place = MOMENTS.index(name), Place.of(part)
        if self._form != FP8:
            return BFloat16Moment(torch.zeros(size, dtype=torch.bfloat16, device=device), place, stream)
        root = stream == 1
        blocks = BlockFloats.zeros(size, device, E4M3_ROOT if root else E4M3, place.start)
        return Float8Moment(blocks, place, stream, root)


def quantized_moments(platform: Platform, args: Namespace) -> QuantizedMoments:
    """Make the place that ``--quant-states`` asks for; contributed to ``memory.optimizer-states``."""
    return QuantizedMoments(platform, args.quant_states)

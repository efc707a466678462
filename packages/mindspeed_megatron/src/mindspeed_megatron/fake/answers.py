"""Answers to code that reads a number of a tensor without values, each counted with its place and value.

A number that is known is returned: one that was made on the host, or follows from such numbers. Of the others
floating-point numbers are 1, so that logarithms and quotients exist, and switches are off, because what
programs ask for most is whether something went wrong. An integer may decide a shape, so that any answer could
be silently wrong: one that is not known is refused with its place.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mindspeed_core.errors import UserError
from mindspeed_megatron import instruments
from mindspeed_megatron.instruments import memory
from mindspeed_megatron.instruments.code_places import CodePlace, running_code

_BETWEEN = (
    os.path.join(Path(__file__).parent, ""),
    os.path.join(Path(instruments.__file__).parent, ""),
    memory.__file__,
    os.path.join(Path(torch.__file__).parent, ""),
)
"""Code between the one that reads and its answer."""
_FRAMES = 8
"""No more modes than these pass an operation on."""


@dataclass(frozen=True)
class Answer:
    """One answered number: file, line and function that read it, and the value it was given."""

    file: str
    line: int
    function: str
    value: bool | int | float

    def __str__(self) -> str:
        """Return ``megatron/core/optimizer/clip_grads.py:140 (get_grad_norm_fp32): 1.0``."""
        return f"{self.file}:{self.line} ({self.function}): {self.value}"


class UnknownNumber(UserError):
    """Integer that code read from a tensor without values, and that may decide a shape.

    Attributes:
        place: the code that reads it, ``file:line (function)``.
    """

    def __init__(self, place: str, told: str = "") -> None:
        """Name the place; ``told`` is said instead of the general reason."""
        self.place = place
        super().__init__(
            told
            or f"{place} reads an integer from a tensor without values, which may decide a shape; compute it "
            "on the host from arguments, or let the feature say so with fake_tensors = False"
        )

    def while_building(self) -> UnknownNumber:
        """Return the error of a model that is built by what it reads."""
        told = (
            f"the model depends on data, which a dry run does not have: {self.place} reads an integer while "
            "it is built; let it follow from arguments, or measure short runs where the data is"
        )
        return UnknownNumber(self.place, told)


class Answers:
    """The numbers that a dry run has answered, and how often.

    Attributes:
        counts: how often each was given.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.counts: Counter[Answer] = Counter()
        self._switches = False

    @contextmanager
    def comparisons_hold(self) -> Iterator[None]:
        """Answer inside the context that what is asked holds: nothing else may be read there."""
        self._switches = True
        try:
            yield
        finally:
            self._switches = False

    def number(self, tensor: torch.Tensor) -> bool | int | float:
        """Return the answer for a tensor of one element, and count it.

        Raises:
            UnknownNumber: an integer.
        """
        place = _reading_code()
        value: bool | int | float
        if tensor.dtype == torch.bool:
            value = self._switches
        elif tensor.dtype.is_floating_point:
            value = 1.0
        else:
            raise UnknownNumber(str(place))
        self.counts[Answer(place.file, place.line, place.function, value)] += 1
        return value

    def numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of answers in the place of one whose values are read all at once.

        Raises:
            UnknownNumber: integers.
        """
        return torch.full(tuple(tensor.shape), self.number(tensor), dtype=tensor.dtype)

    def table(self) -> list[tuple[Answer, int]]:
        """Return every answer with its count, by place."""
        return sorted(self.counts.items(), key=lambda item: (item[0].file, item[0].line))


def reading_place() -> str:
    """Return the place in the code that led to the running operation: ``file:line (function)``."""
    return str(_reading_code())


def _reading_code() -> CodePlace:
    """Return the innermost code outside of torch and of this package."""
    found = running_code(_BETWEEN, _FRAMES)
    # Modes of others may pass the operation on.
    return next((place for place in found if place.function != "__torch_dispatch__"), found[-1])

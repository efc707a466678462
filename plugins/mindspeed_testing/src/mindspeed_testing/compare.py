"""Comparison of two sides tensor by tensor, with a report that names the worst ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The distance of one quantity from its reference.

    Attributes:
        quantity: ``"losses"``, ``"gradients of step 2"``, ….
        key: the tensor.
        error: ``max|a-b| / (max|b| + 1e-12)``; infinite where the two cannot be compared.
        detail: what is wrong in words, where a number does not say it.
        within: whether the tolerance allows it.
    """

    quantity: str
    key: str
    error: float
    detail: str = ""
    within: bool = True

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.quantity}: {self.key}: {self.detail or f'relative error {self.error:.3g}'}"


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison; ``differences`` holds every compared quantity, the worst first."""

    tolerance: float
    differences: tuple[Difference, ...] = ()

    @property
    def equal(self) -> bool:
        """Return whether everything is within the tolerance; False when nothing was compared."""
        return bool(self.differences) and all(difference.within for difference in self.differences)

    @property
    def largest(self) -> float:
        """Return the largest relative error."""
        return max((difference.error for difference in self.differences), default=math.inf)

    def worst(self, count: int = 5) -> tuple[Difference, ...]:
        """Return the quantities that are furthest off."""
        return self.differences[:count]

    def failures(self) -> tuple[Difference, ...]:
        """List everything outside the tolerance, worst first."""
        return tuple(difference for difference in self.differences if not difference.within)

    def __str__(self) -> str:
        """Format a verdict, and the worst quantities when they do not agree."""
        wanted = "bit equality" if self.tolerance == 0 else f"tolerance {self.tolerance:g}"
        count = len(self.differences)
        if self.equal:
            return f"{count} quantities agree within {wanted}; largest relative error {self.largest:.3g}"
        if not count:
            return "nothing was compared"
        bad = self.failures()
        lines = [f"{len(bad)} of {count} quantities differ beyond {wanted}:"]
        lines += [f"  {difference}" for difference in bad[:8]]
        if len(bad) > 8:
            lines.append(f"  and {len(bad) - 8} more")
        return "\n".join(lines)

    @classmethod
    def of(cls, parts: Iterable[Comparison], tolerance: float) -> Comparison:
        """Put several comparisons together."""
        found = [difference for part in parts for difference in part.differences]
        return cls(tolerance, _ordered(found))


def compare_tensors(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    tolerance: float,
    quantity: str = "tensors",
) -> Comparison:
    """Compare two states; a tensor that only one side has is a difference.

    Args:
        actual: the side under test.
        expected: the reference.
        tolerance: largest ``max|a-b| / (max|b| + 1e-12)`` per tensor; 0.0 demands equal bits.
        quantity: name of the quantity in the report.
    """
    found = []
    for key in sorted({*actual, *expected}):
        if key not in actual or key not in expected:
            side = "the reference" if key not in actual else "the side under test"
            found.append(Difference(quantity, key, math.inf, f"exists only on {side}", within=False))
        else:
            found.append(_difference(quantity, key, actual[key], expected[key], tolerance))
    return Comparison(tolerance, _ordered(found))


def compare_numbers(
    actual: Sequence[float], expected: Sequence[float], *, tolerance: float, quantity: str = "losses"
) -> Comparison:
    """Compare two series of numbers, one per step, like tensors of one element.

    Args:
        actual: the side under test.
        expected: the reference, of the same length.
        tolerance: see `compare_tensors`.
        quantity: name of the quantity in the report.
    """
    if len(actual) != len(expected):
        detail = f"{len(actual)} numbers against {len(expected)}"
        return Comparison(tolerance, (Difference(quantity, "length", math.inf, detail, within=False),))
    pairs = zip(actual, expected)
    found = [
        _difference(quantity, f"step {index}", _double(a), _double(b), tolerance)
        for index, (a, b) in enumerate(pairs, start=1)
    ]
    return Comparison(tolerance, _ordered(found))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Compute ``max|a-b| / (max|b| + 1e-12)`` in float64; infinite when a value is not finite."""
    if actual.numel() == 0:
        return 0.0
    a, b = actual.double(), expected.double()
    error = float((a - b).abs().max() / (b.abs().max() + 1e-12))
    return error if math.isfinite(error) else math.inf


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Test that two tensors of one dtype and shape hold the same bits (so a NaN equals itself)."""
    if actual.dtype == torch.bool or actual.is_complex():
        return torch.equal(actual, expected)
    kind = _INTEGERS[actual.element_size()]
    return torch.equal(actual.contiguous().view(kind), expected.contiguous().view(kind))


def _difference(
    quantity: str, key: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float
) -> Difference:
    if actual.shape != expected.shape:
        detail = f"shape {tuple(actual.shape)} against {tuple(expected.shape)}"
        return Difference(quantity, key, math.inf, detail, within=False)
    error = relative_error(actual, expected)
    if tolerance > 0:
        return Difference(quantity, key, error, within=error <= tolerance)
    if actual.dtype != expected.dtype:
        detail = f"{actual.dtype} against {expected.dtype}"
        return Difference(quantity, key, math.inf, detail, within=False)
    if same_bits(actual, expected):
        return Difference(quantity, key, 0.0)
    count = int((actual != expected).sum())
    detail = f"{count} of {actual.numel()} elements differ, relative error {error:.3g}"
    return Difference(quantity, key, error, detail, within=False)


def _double(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _ordered(found: Iterable[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(found, key=lambda d: (d.within, -d.error, d.quantity, d.key)))

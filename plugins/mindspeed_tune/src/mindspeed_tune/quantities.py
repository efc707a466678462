"""Numbers as a reader wants them."""

from __future__ import annotations


def size(count: float) -> str:
    """Return bytes with a binary unit: ``139.5 GiB``."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= factor:
            value = count / factor
            return f"{value:,.2f} {unit}" if abs(value) < 10 else f"{value:,.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Return seconds with a unit that suits them: ``12.4 s``, ``350 ms``."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"


def count(number: float) -> str:
    """Return a number with separators; halves and such with one decimal."""
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.1f}"


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{share * 100:.1f} %"

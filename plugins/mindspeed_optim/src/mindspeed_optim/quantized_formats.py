"""Formats of ``--quant-states``, the stored ones and the refused ones; no torch."""

from __future__ import annotations

from collections.abc import Iterator

FP8, BF16 = "fp8", "bf16"
"""e4m3 with a scale for every block of 128; bfloat16. Both rounded stochastically."""
MXFP8, HIF8 = "mxfp8", "hif8"
"""MindSpeed's other two, which are refused."""
FORMATS = (FP8, BF16, MXFP8, HIF8)
"""Values of the flag."""


def format_problems(flag: str, name: str | None) -> Iterator[str]:
    """Yield why a format cannot be stored, and the way out.

    Args:
        flag: the option string.
        name: its value; None where it was not given.

    Yields:
        One sentence each.
    """
    if name in (MXFP8, HIF8):
        yield f"{flag} {name}: this format is not stored; use {flag} {FP8}, which takes as many bytes"

"""Counted work as data: the names under which operators are counted, and their operations. No torch."""

from __future__ import annotations

from collections.abc import Mapping

MATRIX, ATTENTION, BYTES, OPERATORS = "matrix", "attention", "bytes", "operators"
"""Keys of counted work: ``"matrix bfloat16 4096 8192 1024"`` (m, n, k of products of ``[m, k]`` and
``[k, n]``), ``"attention bfloat16"`` (operations of attention and of whatever else has a formula),
``"bytes"`` and ``"operators"`` of everything else."""


def matrix_key(dtype: str, m: int, n: int, k: int) -> str:
    """Return under what products of one shape are counted."""
    return f"{MATRIX} {dtype} {m} {n} {k}"


def operations(work: Mapping[str, float]) -> float:
    """Return the floating-point operations of matrix products and attention."""
    total = 0.0
    for quantity, count in work.items():
        words = quantity.split()
        if words[0] == MATRIX:
            m, n, k = map(int, words[2:])
            total += 2.0 * m * n * k * count
        elif words[0] == ATTENTION:
            total += count
    return total

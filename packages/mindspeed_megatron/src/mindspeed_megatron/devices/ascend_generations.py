"""Generations of Ascend devices, told by the name that the runtime gives a device."""

from __future__ import annotations

_BY_PREFIX = (
    ("Ascend950", "950"),
    ("Ascend910_95", "950"),
    ("Ascend910_93", "910_93"),
    ("Ascend910B", "910B"),
    ("Ascend310P", "310P"),
)
"""Beginnings of names, the longer before those that they begin with."""


def generation_of(device: str) -> str:
    """Return a device's generation as CANN names it: ``910B`` (Atlas A2), ``910_93`` (Atlas A3), ``950``.

    Operators have kernels for some generations alone, and limits that differ between them.

    Args:
        device: as the runtime names it, ``Ascend910B1``.

    Returns:
        The generation; empty for a device that is not known here.
    """
    return next((generation for prefix, generation in _BY_PREFIX if device.startswith(prefix)), "")

"""Lists of layers: ``0`` for all of them, else numbers and ranges from 1, ``1-3,5``; no torch."""

from __future__ import annotations

import re

_PART = re.compile(r"(\d+)(?:-(\d+))?\Z")


def chosen_layers(text: str, layers: int) -> frozenset[int]:
    """Return the numbers of the layers that a list names.

    Args:
        text: the list.
        layers: how many there are.

    Raises:
        ValueError: the list is none, names a layer twice, or one that there is not.
    """
    if text.strip() == "0":
        return frozenset(range(1, layers + 1))
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.match(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is no number of a layer and no range; write 0, or 1-3,5")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ValueError(f"the range {part.strip()} ends before it begins")
        if first < 1 or last > layers:
            raise ValueError(f"{part.strip()} is beyond the layers, which are 1 to {layers}")
        twice = found.intersection(range(first, last + 1))
        if twice:
            raise ValueError(f"layer {min(twice)} is named twice")
        found.update(range(first, last + 1))
    return frozenset(found)

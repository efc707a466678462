"""Names in a folder of checkpoints, as Megatron-LM and everybody who reads its checkpoints know them."""

from __future__ import annotations

import re

TRACKER = "latest_checkpointed_iteration.txt"
"""The file in the folder of ``--save`` that tells the latest checkpoint; it holds the step as text."""
PUBLISHED = re.compile(r"iter_(\d{7,})\Z")
"""Names of the folders of complete checkpoints."""


def directory_name(iteration: int) -> str:
    """Return the name of a published checkpoint, as Megatron-LM spells it."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """Return the step in the name of a published checkpoint; None for any other name.

    Args:
        name: of a folder or of a prefix in an object store.
    """
    match = PUBLISHED.match(name)
    return int(match[1]) if match else None

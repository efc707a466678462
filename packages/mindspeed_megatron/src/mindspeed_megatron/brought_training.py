"""The ``megatron.training`` that megatron-core from PyPI brings since 0.17, without Megatron-LM's scripts.

That it can be imported says nothing of a checkout.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def is_brought(training: Path) -> bool:
    """Return whether a ``megatron.training`` is that of the installed megatron-core.

    Args:
        training: the package's folder.

    Returns:
        False too where megatron-core is not installed as a distribution, but lies in a checkout.
    """
    try:
        brought = Path(str(distribution("megatron-core").locate_file("megatron/training")))
    except PackageNotFoundError:
        return False
    return training.resolve() == brought.resolve()

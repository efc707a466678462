"""Versions of what is installed, also where megatron-core comes from a checkout instead of a distribution."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

_CORE = "megatron-core"


def installed_version(name: str) -> str:
    """Return the version of a distribution, an empty string where it is not installed.

    A loaded megatron-core speaks for itself: people train from a checkout that no installer knows, or that
    comes before the installed one on the module path.
    """
    if name.lower().replace("_", "-") == _CORE:
        loaded = getattr(sys.modules.get("megatron.core"), "__version__", "")
        if loaded:
            return str(loaded)
    return _of_distribution(name)


@lru_cache(maxsize=1024)
def _of_distribution(name: str) -> str:
    try:
        return version(name) or ""
    except PackageNotFoundError:
        return ""

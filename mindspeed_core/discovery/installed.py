"""Versions and places of what is installed, also where megatron-core comes from a checkout."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mindspeed_core.discovery.distributions import headers, installed_distributions, normalized

if TYPE_CHECKING:
    from pathlib import Path

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


def package_places(package: str) -> list[Path]:
    """Find the folders (or the file) of an import package without importing it; empty where it is absent."""
    from pathlib import Path

    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(location) for location in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []


def package_file(reference: str) -> Path | None:
    """Return the file that ``"package:relative/path"`` names; None where the package does not have it."""
    package, _, relative = reference.partition(":")
    candidates = (place / relative for place in package_places(package))
    return next((path for path in candidates if path.is_file()), None)


@lru_cache(maxsize=1024)
def _of_distribution(name: str) -> str:
    wanted = normalized(name)
    reader = next((read for dist, read in installed_distributions() if dist == wanted), None)
    return headers(reader).get("Version", "") if reader else ""

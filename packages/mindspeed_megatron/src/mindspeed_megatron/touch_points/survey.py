"""Comparison of the installed megatron-core with the recorded ones, for the doctor and the start of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mindspeed_core.discovery.installed import package_places
from mindspeed_megatron.touch_points.changes import Change, changes
from mindspeed_megatron.touch_points.record import index, known_uses, known_version, nearest
from mindspeed_megatron.touch_points.sources import Sources
from mindspeed_megatron.touch_points.uses import Use, package_sources, uses_of


@dataclass(frozen=True)
class Survey:
    """The touch points of an unknown megatron-core.

    Attributes:
        version: the one that is installed.
        compared: the recorded version that it is compared with.
        points: number of touch points.
        changes: those that differ.
    """

    version: str
    compared: str
    points: int
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        """Return the sentence of the doctor, without the list."""
        count = len(self.changes)
        return (
            f"{self.version} is unknown: {count} of {self.points} touch points changed since {self.compared}"
        )


def is_recorded(version: str) -> bool:
    """Return whether this version was read; builds of it (``0.16.1+local``) count as it."""
    return version.partition("+")[0] in index()


def sources_place() -> Path | None:
    """Return the folder that contains the ``megatron`` which would be imported; None where there is none."""
    for place in package_places("megatron"):
        if (place / "core" / "__init__.py").is_file():
            return place.parent
    return None


def survey(version: str, packages: Iterable[str] = ()) -> Survey | None:
    """Compare the megatron-core on the module path, which is of an unknown version, with the nearest known.

    Args:
        version: its version.
        packages: import packages of installed plugins; those of other people are read too.

    Returns:
        None where megatron-core is not on the module path, or its version is none.
    """
    from packaging.version import InvalidVersion

    place = sources_place()
    try:
        return None if place is None else _survey(version, place, tuple(sorted(set(packages))))
    except InvalidVersion:
        # Somebody's own build, which cannot be put in order.
        return None


@lru_cache(maxsize=4)
def _survey(version: str, place: Path, packages: tuple[str, ...]) -> Survey:
    recorded, uses = known_uses()
    merged, foreign = {**uses}, foreign_uses(packages, recorded)
    for point, use in foreign.items():
        merged[point] = _both(merged[point], use) if point in merged else use
    compared, unrecorded = nearest(version), foreign.keys() - uses.keys()
    now = Sources.of_folder(place).symbol
    found = changes(merged, known_version(compared).symbols, now, unrecorded)
    return Survey(version, compared, len(merged), tuple(found))


def foreign_uses(packages: Iterable[str], recorded: Iterable[str]) -> dict[str, Use]:
    """Return what packages use whose uses are not recorded: plugins of other people."""
    folders = [place for name in sorted({*packages} - {*recorded}) for place in package_places(name)]
    found = uses_of(package_sources(folder for folder in folders if folder.is_dir()))
    # A member may be the plugin's own; only what it imports, calls by name or patches is sure.
    return {point: use for point, use in found.items() if not use.optional or use.replaced}


def _both(one: Use, other: Use) -> Use:
    return Use(
        one.modules | other.modules,
        one.calls | other.calls,
        one.replaced | other.replaced,
        one.optional and other.optional,
    )

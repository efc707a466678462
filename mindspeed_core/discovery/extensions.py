"""Objects that packages contribute to a plugin's extension point, with or without a session.

A registry loads extensions through here, and so does a plugin that has no registry at hand, for instance an
operator that is called outside of a session. One broken package never takes others down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from mindspeed_core.discovery.entry_points import BrokenPlugin, Installed, Source, broken, load_object
from mindspeed_core.errors import UserError, guess
from mindspeed_core.feature import ExtensionPoint


class ExtensionError(UserError):
    """An extension that is asked for is not installed or cannot be loaded."""


class Extensions:
    """The contributions to one extension point; each is imported when it is first asked for.

    Attributes:
        point: the extension point.
        broken: contributions that could not be loaded so far, or that the point's check refused.
    """

    def __init__(self, point: ExtensionPoint, installed: Installed | None = None) -> None:
        """Look up the entry points of ``point.group``; import nothing.

        Args:
            point: the extension point.
            installed: where they are looked up; None reads what is installed now.
        """
        self.point = point
        self.broken: list[BrokenPlugin] = []
        self._sources: dict[str, list[Source]] = {}
        for source in (installed or Installed()).sources(point.group):
            self._sources.setdefault(source.name, []).append(source)
        self._loaded: dict[str, Any] = {}
        self._failed: dict[str, BrokenPlugin] = {}

    def names(self) -> tuple[str, ...]:
        """Return the names of all contributions, sound or not, without importing them."""
        return tuple(self._sources)

    def distribution(self, name: str) -> str:
        """Return the distribution that contributes ``name``; its name as pip knows it."""
        return self._sources[name][0].dist

    def get(self, name: str) -> Any:
        """Return one contribution; no other is imported.

        Raises:
            ExtensionError: no package contributes it, several do, or it cannot be loaded.
        """
        if name not in self._sources:
            raise ExtensionError(not_installed(self.point.name, name, self._sources))
        if name not in self._loaded and name not in self._failed:
            self._load(name)
        if name in self._failed:
            record = self._failed[name]
            raise ExtensionError(f"{self.point.name} {name!r}: {record}; {record.remedy}")
        return self._loaded[name]

    def sound(self) -> Mapping[str, Any]:
        """Import all contributions and return the sound ones by name; the others are in `broken`."""
        for name in self._sources:
            if name not in self._loaded and name not in self._failed:
                self._load(name)
        return self._loaded

    def _load(self, name: str) -> None:
        claimed = self._sources[name]
        failure: BaseException | str
        if len(claimed) > 1:
            owners = " and ".join(f"{source.dist} {source.version}" for source in claimed)
            failure = f"{self.point.name} {name!r} is contributed by {owners}"
        else:
            try:
                extension = claimed[0].load()
                if self.point.check:
                    load_object(self.point.check)(extension)
            except (Exception, SystemExit) as error:
                failure = error
            else:
                self._loaded[name] = extension
                return
        records = [broken(source, failure) for source in claimed]
        self.broken += records
        self._failed[name] = records[0]


@cache
def installed_extensions(point: ExtensionPoint) -> Extensions:
    """Return the contributions to a point in this process; for code that runs without a session."""
    return Extensions(point)


BROUGHT_BY = {
    "standalone": "mindspeed-train",
    **dict.fromkeys(
        ("cuda", "npu", "fake", "fake-cuda", "fake-npu", "library", "megatron-lm"), "mindspeed-megatron"
    ),
}
"""Hosts and platforms of this project, and their distributions: data for a message."""


def not_installed(kind: str, name: str, installed: Iterable[str]) -> str:
    """Compose the message about something that is not installed, with what is and what may be meant."""
    known = sorted(installed)
    way_out = f"; pip install {BROUGHT_BY[name]}" if name in BROUGHT_BY else guess(name, known)
    return f"{kind} {name!r} is not installed (installed: {', '.join(known) or 'none'}){way_out}"

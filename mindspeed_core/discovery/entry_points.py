"""Entry points of the installed distributions, read and loaded so that a broken one hurts no other.

Everything a distribution can get wrong while it is loaded (an import that fails or exits, an object of the
wrong kind, metadata that cannot be read) becomes one `BrokenPlugin` record here and touches nobody else.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

from mindspeed_core.discovery.distributions import Reader, entries, headers, installed_distributions

FEATURES = "mindspeed.features"
PLATFORMS = "mindspeed.platforms"
HOSTS = "mindspeed.hosts"
COMMANDS = "mindspeed.commands"
"""Sub-commands of ``mindspeed-features``."""
TRAIN_COMMANDS = "mindspeed.train_commands"
"""Sub-commands of ``mindspeed-train``."""

_MESSAGE = 300


@dataclass(frozen=True)
class BrokenPlugin:
    """Something installed that cannot be used; only asking for it is an error.

    Attributes:
        feature: the feature that is broken, or empty: everything behind the entry point.
        flags: option strings that belong to it, as far as they are known.
        traceback: of the error, as Python prints it; empty where none was raised.
    """

    dist: str
    version: str
    entry_point: str
    feature: str
    error: str
    remedy: str
    flags: tuple[str, ...] = ()
    traceback: str = field(default="", repr=False, compare=False)

    def __str__(self) -> str:
        """Return one sentence that names distribution, feature and error."""
        feature = f", feature {self.feature}" if self.feature else ""
        return f"{self.dist} {self.version} (entry point {self.entry_point}{feature}) is broken: {self.error}"


class Source(NamedTuple):
    """One entry point, not loaded yet; ``value`` is ``"module:attribute"``."""

    dist: str
    version: str
    name: str
    value: str

    @property
    def package(self) -> str:
        """Return the top-level import package behind the entry point."""
        return self.value.partition(":")[0].strip().partition(".")[0]

    def load(self) -> Any:
        """Import the module and return the object."""
        return load_object(self.value.partition("[")[0])


def load_object(path: str) -> Any:
    """Import what ``"module:attribute"``, or ``"module"`` alone, names."""
    module, _, attribute = path.partition(":")
    loaded: Any = import_module(module.strip())
    for part in filter(None, attribute.strip().split(".")):
        loaded = getattr(loaded, part)
    return loaded


class Installed:
    """The entry points of everything that is installed, read once.

    Attributes:
        damaged: distributions whose list of entry points cannot be read; usually none.
    """

    _shared: ClassVar[dict[str, list[tuple[str, str, Reader]]] | None] = None

    def __init__(self) -> None:
        """Read the files of all distributions; import nothing."""
        self.damaged: list[BrokenPlugin] = []
        self._groups = self._read() if Installed._shared is None else Installed._shared

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let declarations that look up entry points while they are loaded use these, and read none anew.

        No garbage is collected meanwhile: what they make stays, and the search through it takes its time.
        """
        before, Installed._shared = Installed._shared, self._groups
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            Installed._shared = before
            if collects:
                gc.enable()

    def sources(self, *groups: str) -> list[Source]:
        """Return the entry points of groups, sorted by name and distribution."""
        listed = [entry for group in groups for entry in self._groups.get(group, ())]
        sources = [Source(*_name_and_version(read, value), name, value) for name, value, read in listed]
        return sorted(sources, key=lambda source: (source.name, source.dist.lower(), source.value))

    def _read(self) -> dict[str, list[tuple[str, str, Reader]]]:
        groups: dict[str, list[tuple[str, str, Reader]]] = {}
        for dist, read in installed_distributions():
            try:
                listed = list(entries(read))
            except Exception as error:
                self.damaged.append(
                    BrokenPlugin(
                        dist=dist,
                        version="unknown",
                        entry_point="entry_points.txt",
                        feature="",
                        error=f"its entry points cannot be read: {describe(error)}",
                        remedy=f"pip install --force-reinstall {dist}",
                    )
                )
                continue
            for group, name, value in listed:
                groups.setdefault(group, []).append((name, value, read))
        return groups


@lru_cache(maxsize=1024)
def _name_and_version(read: Reader, value: str) -> tuple[str, str]:
    """Return what the distribution of an entry point is called, and its version."""
    try:
        fields = headers(read)
        return fields["Name"], fields["Version"]
    except Exception:
        # Damaged metadata: the entry point may still load, and is listed under its own name.
        return value.partition(":")[0].partition(".")[0].replace("_", "-"), "unknown"


def broken(source: Source, error: BaseException | str, feature: str = "", remedy: str = "") -> BrokenPlugin:
    """Return the record of a failure while loading or checking a source."""
    from traceback import format_exception

    text = error if isinstance(error, str) else describe(error, source.package)
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "mindspeed_core":
        remedy = remedy or "it may need a newer core: pip install --upgrade mindspeed-core"
    return BrokenPlugin(
        dist=source.dist,
        version=source.version,
        entry_point=source.name,
        feature=feature,
        error=text,
        remedy=remedy
        or f"pip install --upgrade {source.dist}, or pip uninstall {source.dist} if you do not need it",
        traceback="" if isinstance(error, str) else "".join(format_exception(error)),
    )


def iterate(loaded: Any) -> list[Any]:
    """Return the declarations that an entry point names.

    Raises:
        TypeError: it names something else.
    """
    if isinstance(loaded, (str, bytes, type)) or not isinstance(loaded, Iterable):
        raise TypeError(
            f"the entry point names {loaded!r}, not an iterable of declarations (a tuple of Feature classes)"
        )
    return list(loaded)


def describe(error: BaseException, package: str = "") -> str:
    """Return an exception as one sentence: type, message, and the last line of ``package`` it passed."""
    from pathlib import PurePath
    from traceback import extract_tb

    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "(its message cannot be printed)"
    if isinstance(error, SystemExit):
        message = f"it tried to exit the program ({message})"
    where = ""
    for frame in extract_tb(error.__traceback__):
        path = PurePath(frame.filename)
        matched = next((part for part in (package, f"{package}.py") if package and part in path.parts), "")
        if matched:
            inside = path.parts[path.parts.index(matched) :]
            where = f" ({'/'.join(inside)}:{frame.lineno})"
    return f"{type(error).__name__}: {message[:_MESSAGE]}{where}"

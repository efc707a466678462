"""The records of a command line: flags as given, flags with their owners, and what parsing gives."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_core.feature import Flag
from mindspeed_core.flags.notes import FlagNote
from mindspeed_core.resolver.plan import HeldBack, Problem


@dataclass(frozen=True)
class Given:
    """One flag as it was given.

    Attributes:
        option: the option string.
        values: the words behind it; of a dictionary the one value, as it is.
        inline: it was written ``--option=value``.
        named: of a dictionary: the key that was used, which may be no option string; else empty.
    """

    option: str
    values: tuple[Any, ...] = ()
    inline: bool = False
    named: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """Return the values as one would type them; a switch that is on has none."""
        if not self.named:
            return tuple(str(value) for value in self.values)
        flat: list[Any] = []
        for value in self.values:
            flat += value if isinstance(value, (list, tuple)) else [value]
        return tuple(str(value) for value in flat if not isinstance(value, bool))

    @property
    def is_off(self) -> bool:
        """Return whether a dictionary says that a switch is not given."""
        return bool(self.named) and (self.values == (False,) or self.values == (None,))

    def __str__(self) -> str:
        """Return the flag as one would type it."""
        return " ".join((self.option, *self.words))


@dataclass(frozen=True)
class Adoption:
    """A feature's use, with its own declaration, of a flag that somebody else defines."""

    owner: str
    flag: Flag


@dataclass
class FlagEntry:
    """One flag of a `FlagSet`.

    Attributes:
        flag: the declaration; its choices grow when features adopt it.
        owner: who defines it: the core, a host or a feature.
        heading: the group in ``--help``.
        notes: appended to the help.
        adoptions: features that use it too.
    """

    flag: Flag
    owner: str
    heading: str
    notes: tuple[str, ...] = ()
    adoptions: list[Adoption] = field(default_factory=list)


@dataclass(frozen=True)
class ParsedArguments:
    """The outcome of parsing.

    Attributes:
        args: every known destination with its value.
        provenance: where each value came from: ``"flag --x"``, ``"preset NAME"`` or ``"default"``.
        problems: what is wrong with the command line; the values concerned keep their defaults.
        wants_help: ``--help`` or ``-h`` was given.
        left_out: features that nobody asked for and whose presets fail.
        flag_notes: given flags that change nothing here, or are read as others.
        argv: the flags that were read, as one would type them; of a dictionary or namespace empty.
    """

    args: Namespace
    provenance: Mapping[str, str]
    problems: tuple[Problem, ...]
    wants_help: bool = False
    left_out: tuple[HeldBack, ...] = ()
    flag_notes: tuple[FlagNote, ...] = ()
    argv: tuple[str, ...] = ()

"""The command line: flags of the core, of a host and of every installed feature.

argparse stops at the first mistake and leaves the program. Here every mistake of a command line is reported
at once as a `Problem`, values remember where they came from, and a flag that a host already has is adopted by
the feature that extends it. The accepted syntax is argparse's with ``allow_abbrev=False``; argparse itself
formats ``--help``.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.discovery.parts import part_if_installed
from mindspeed_core.feature import Flag
from mindspeed_core.flags.core import CORE_FLAGS, CORE_OWNER, IGNORE_UNKNOWN
from mindspeed_core.flags.entries import Adoption, FlagEntry, Given, ParsedArguments
from mindspeed_core.flags.notes import FlagNote
from mindspeed_core.flags.presets import DEFAULT, apply_adopted_defaults, apply_presets
from mindspeed_core.flags.reading import Reading
from mindspeed_core.flags.unknown import NO_SUCH_FLAG, unknown_flag
from mindspeed_core.flags.values import arity, kind_of_flag, most_values, shown_option, shown_value
from mindspeed_core.resolver.plan import Problem

if TYPE_CHECKING:
    from mindspeed_core.registry import FeatureRecord, Registry

_IGNORED = "nobody knows it, and --ignore-unknown-args is given"
_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)


class FlagSet:
    """Flags with owners, in the order in which they were added."""

    def __init__(self, registry: Registry | None = None) -> None:
        """Begin without flags; ``registry`` names the owner of a flag that is not there."""
        self._registry = registry
        self._entries: list[FlagEntry] = []
        self._by_option: dict[str, FlagEntry] = {}
        self._defaults: dict[str, Any] = {}
        self._clashes: list[tuple[Problem, frozenset[str]]] = []
        self._features: list[FeatureRecord] = []
        self.host = ""

    @property
    def entries(self) -> tuple[FlagEntry, ...]:
        """Return every flag with its owner."""
        return tuple(self._entries)

    @property
    def features(self) -> tuple[FeatureRecord, ...]:
        """Return the features whose flags these are."""
        return tuple(self._features)

    def __contains__(self, option: object) -> bool:
        """Return whether an option string is known."""
        return option in self._by_option

    def __getitem__(self, option: str) -> FlagEntry:
        """Return the flag with an option string.

        Raises:
            KeyError: no flag has it.
        """
        return self._by_option[option]

    def per_rank(self) -> frozenset[str]:
        """Return the destinations whose values may differ between ranks."""
        return frozenset(entry.flag.dest for entry in self._entries if entry.flag.per_rank)

    def add(
        self, flag: Flag, owner: str, heading: str, *, note: str = "", related: Iterable[str] = ()
    ) -> FlagEntry | None:
        """Add a flag, or let ``owner`` adopt the one that is there.

        Adoption extends the choices, says so in the help, and remembers a changed default.

        Args:
            flag: the declaration.
            owner: the core, a host or a feature.
            heading: the group in ``--help``; ``flag.group`` wins.
            note: appended to the help.
            related: further option strings of the owner; giving one of them makes a clash a problem.

        Returns:
            The entry, or ``None`` when the flag there means something else; using it is a problem then.
        """
        present = next((self._by_option[o] for o in flag.options if o in self._by_option), None)
        if present is None:
            entry = FlagEntry(flag, owner, flag.group or heading, (note,) if note else ())
            self._entries.append(entry)
            for option in flag.options:
                self._by_option[option] = entry
            self._defaults.setdefault(flag.dest, flag.default)
            return entry
        if present.flag.meaning() != flag.meaning():
            self._clash(present, flag, owner, related)
            return None
        self._adopt(present, flag, owner)
        return present

    def _clash(self, present: FlagEntry, flag: Flag, owner: str, related: Iterable[str]) -> None:
        problem = Problem(
            "E-FLAG-CLASH",
            f"{present.owner} defines it as {kind_of_flag(present.flag)}, {owner} as {kind_of_flag(flag)}",
            f"uninstall or upgrade the package of one of them; until then {present.owner}'s meaning holds",
            feature=owner,
            flag=flag.name,
        )
        self._clashes.append((problem, frozenset((*flag.options, *related))))

    def _adopt(self, present: FlagEntry, flag: Flag, owner: str) -> None:
        known = present.flag
        added = tuple(c for c in flag.choices if c not in known.choices) if known.choices else ()
        options = tuple(o for o in flag.options if o not in known.options)
        free = tuple(o for o in options if o not in self._by_option)
        present.flag = replace(
            known,
            choices=known.choices + added,
            aliases=known.aliases + free,
            per_rank=known.per_rank or flag.per_rank,
            choices_from=known.choices_from or flag.choices_from,
        )
        for option in free:
            self._by_option[option] = present
        present.adoptions.append(Adoption(owner, flag))
        if added:
            present.notes += (f"{', '.join(map(str, added))}: {owner}",)

    def add_features(self, registry: Registry) -> None:
        """Add the flags of every sound feature, grouped by distribution and family."""
        for record in registry.features.values():
            cls = record.cls
            heading = f"{record.dist} {record.version}: {cls.family}"
            related = {option for flag in cls.flags for option in flag.options}
            for flag in cls.flags:
                self.add(
                    _with_extensions(flag, registry),
                    cls.name,
                    heading,
                    note=f"[level {cls.level}, {cls.stability}]",
                    related=related,
                )
            self._features.append(record)

    def parse(self, argv: Sequence[str]) -> ParsedArguments:
        """Parse a command line without the program's name; never exits and never raises."""
        reading = Reading(self._registry)
        given, wants_help = self._split(argv, reading)
        read = self._read(given, reading)
        ignored = [one for one in read if one.option not in self._by_option and self._ignores(one, read)]
        reading.notes += [FlagNote(str(one), _IGNORED) for one in ignored]
        for one in read:
            entry = self._by_option.get(one.option)
            if entry is not None:
                reading.take(entry, one.option, [str(value) for value in one.values], one.inline)
            elif one not in ignored:
                reading.problems.append(self.unknown(one.option))
        kept = [one for one in read if one not in ignored]
        parsed = self._finish(reading, wants_help)
        return replace(parsed, argv=tuple(token for one in kept for token in _typed(one)))

    def given(self, argv: Sequence[str]) -> list[Given]:
        """Return the flags of a command line with the words behind each, before anybody judges them."""
        return self._split(argv, Reading(self._registry))[0]

    def _split(self, argv: Sequence[str], reading: Reading) -> tuple[list[Given], bool]:
        """Return the flags of a command line with the words behind each, and whether help is wanted."""
        tokens = [str(token) for token in argv]
        given: list[Given] = []
        stray: list[tuple[str, str]] = []
        wants_help = False
        position = 0
        while position < len(tokens):
            token = tokens[position]
            position += 1
            if token in ("--help", "-h"):
                wants_help = True
                continue
            if not _is_option(token):
                stray.append((given[-1].option if given else "", token))
                continue
            option, equals, inline = token.partition("=")
            entry = self._by_option.get(option)
            values: list[str] = []
            limit = most_values(entry.flag) if entry is not None and not equals else None
            if equals:
                values.append(inline)
            else:
                while position < len(tokens) and not _is_option(tokens[position]):
                    if limit is not None and len(values) >= limit:
                        break
                    values.append(tokens[position])
                    position += 1
            given.append(Given(option, tuple(values), bool(equals)))
        reading.problems += [self._stray(option, words) for option, words in _grouped(stray)]
        return given, wants_help

    def _read(self, given: Sequence[Given], reading: Reading) -> list[Given]:
        """Return the flags to take: translated from other spellings, without those that change nothing."""
        read = part_if_installed("read_upstream_flags")
        if read is None:
            return list(given)
        translated = read(given, self.__contains__, self._accepts, self._is_broken)
        reading.notes += translated.notes
        reading.problems += translated.problems
        return translated.given

    def _accepts(self, option: str, words: Sequence[str]) -> bool:
        """Return whether a declared flag with choices has all of these among them."""
        choices = {str(choice) for choice in self._by_option[option].flag.choices}
        return not choices or set(words) <= choices

    def _is_broken(self, option: str) -> bool:
        return self._registry is not None and option in self._registry.broken_flags

    def _ignores(self, one: Given, read: Sequence[Given]) -> bool:
        """Return whether to ignore an unknown flag: the user asked for it, and no package knows the flag."""
        wanted = any(other.option == IGNORE_UNKNOWN for other in read)
        return wanted and self.unknown(one.option).reason == NO_SUCH_FLAG

    def _stray(self, option: str, words: Sequence[str]) -> Problem:
        """Return the problem of words behind a flag, or before the first one, that belong to no flag."""
        shown = ", ".join(shown_value(word) for word in words[:5])
        remedy = "write the flag before its value"
        if option:
            entry = self._by_option.get(option)
            taken = f"{option} takes {arity(entry.flag)}" if entry is not None else "it is unknown"
            remedy = f"drop it ({taken}), or {remedy}"
        return Problem("E-FLAG-VALUE", f"{shown}: belongs to no flag", remedy, flag=shown_option(option))

    def parse_mapping(self, values: Mapping[str, Any]) -> ParsedArguments:
        """Take arguments from a dictionary.

        Keys are option strings with or without dashes, or destinations; values have the flag's type or are
        the text one would type. ``None`` means not given, ``True`` for a switch means given.
        """
        reading = Reading(self._registry)
        by_dest = {entry.flag.dest: entry for entry in reversed(self._entries)}
        given: list[Given] = []
        for key, value in values.items():
            bare = str(key).lstrip("-")
            options = (str(key), "--" + bare, "--" + bare.replace("_", "-"))
            option = next((o for o in options if o in self._by_option), options[-1])
            given.append(Given(option, (value,), named=str(key)))
        for one in self._read(given, reading):
            declared = self._by_option.get(one.option)
            entry = declared or by_dest.get(one.named.lstrip("-").replace("-", "_"))
            if entry is None:
                reading.problems.append(self.unknown(one.option))
            elif not one.named:
                reading.take(entry, one.option, [str(value) for value in one.values], False)
            elif one.values[0] is not None:
                named = one.option if declared is not None else entry.flag.name
                reading.take_value(entry, named, one.values[0], declared is not None)
        return self._finish(reading, False)

    def parse_namespace(self, namespace: Namespace) -> ParsedArguments:
        """Take arguments from somebody else's namespace: its foreign attributes are ignored.

        A value that equals the default counts as not given.
        """
        reading = Reading(self._registry)
        done: set[str] = set()
        for entry in self._entries:
            dest = entry.flag.dest
            if dest in done:
                continue
            done.add(dest)
            value = getattr(namespace, dest, None)
            if value is not None and _differ(value, self._defaults[dest]):
                reading.take_value(entry, entry.flag.name, value, False)
        return self._finish(reading, False)

    def _finish(self, reading: Reading, wants_help: bool) -> ParsedArguments:
        given, problems = reading.given, reading.problems
        values: dict[str, Any] = {
            dest: list(default) if isinstance(default, list) else default
            for dest, default in self._defaults.items()
        }
        provenance = dict.fromkeys(values, DEFAULT)
        for dest, (value, source) in given.items():
            values[dest] = value
            provenance[dest] = source
        args = Namespace(**values)
        used = {source.removeprefix("flag ") for _, source in given.values()}
        problems += [problem for problem, options in self._clashes if options & used]
        left_out = apply_presets(self._features, args, provenance, problems, self._entries)
        apply_adopted_defaults(self._entries, self._features, args, provenance)
        return ParsedArguments(
            args, provenance, tuple(problems), wants_help, tuple(left_out), tuple(reading.notes)
        )

    def unknown(self, option: str) -> Problem:
        """Return the problem of an option string nobody here defines: who owns it, or what was meant."""
        return unknown_flag(option, self._by_option, self._registry, self.host)


def known_flags(registry: Registry, host: str = DEFAULT_HOST) -> FlagSet:
    """Return the flags of `flag_set`, made at the first call for a registry: to parse with, not to add to.

    Raises:
        mindspeed_core.registry.RegistryError: the host is not installed or its flags cannot be loaded.
    """
    if host not in registry.flag_sets:
        registry.flag_sets[host] = flag_set(registry, host)
    known: FlagSet = registry.flag_sets[host]
    return known


def flag_set(registry: Registry, host: str = DEFAULT_HOST) -> FlagSet:
    """Return the flags of the core, of a host (none for an empty name) and of every installed feature.

    Raises:
        mindspeed_core.registry.RegistryError: the host is not installed or its flags cannot be loaded.
    """
    flags = FlagSet(registry)
    flags.host = host
    for flag in CORE_FLAGS:
        if flag.name == "--platform":
            flag = replace(flag, choices=("auto", *registry.platform_names()))
        flags.add(flag, CORE_OWNER, CORE_OWNER)
    for flag in registry.host_flags(host) if host else ():
        flags.add(flag, f"host {host}", f"host {host}")
    flags.add_features(registry)
    return flags


def _grouped(stray: Iterable[tuple[str, str]]) -> Iterable[tuple[str, list[str]]]:
    """Return the stray words of each flag that they follow."""
    words: dict[str, list[str]] = {}
    for option, word in stray:
        words.setdefault(option, []).append(word)
    return words.items()


def _with_extensions(flag: Flag, registry: Registry) -> Flag:
    """Return the flag with the names that packages contribute to its extension point among its choices."""
    if not flag.choices_from:
        return flag
    added = [name for name in registry.extension_names(flag.choices_from) if name not in flag.choices]
    return replace(flag, choices=(*flag.choices, *added))


def _typed(one: Given) -> tuple[str, ...]:
    if one.inline:
        return (f"{one.option}={one.values[0]}",)
    return (one.option, *(str(value) for value in one.values))


def _differ(value: Any, default: Any) -> bool:
    try:
        return bool(value != default)
    except Exception:
        # Arrays have no single truth value; whatever cannot be compared was not left at its default.
        return True


def _is_option(token: str) -> bool:
    if len(token) < 2 or token[0] != "-" or _NEGATIVE.match(token):
        return False
    return " " not in token.partition("=")[0]

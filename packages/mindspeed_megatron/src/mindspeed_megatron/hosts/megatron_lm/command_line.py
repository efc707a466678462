"""The flags of features inside Megatron-LM's argparse parser.

A flag that the parser has already is adopted (its choices grow), every other one is added. What was given,
what features preset and what is wrong with their flags comes from `FlagSet`, which reads the same command
line; values of Megatron-LM's own flags stay argparse's business.
"""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindspeed_core.flags.core import CORE_FLAGS, CORE_OWNER
from mindspeed_core.flags.entries import FlagEntry, ParsedArguments
from mindspeed_core.flags.flag_set import FlagSet
from mindspeed_core.flags.help import adopted_help
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError, Problem
from mindspeed_megatron.hosts.megatron_lm import NAME
from mindspeed_megatron.hosts.megatron_lm.flags import flags_of, options_of

_OWNER = f"host {NAME}"


def asked_for(option: str, argv: Sequence[str]) -> str:
    """Return the value of an option before any parser exists, empty where it is not given."""
    for index, token in enumerate(argv):
        if token == option and index + 1 < len(argv):
            return argv[index + 1]
        if token.startswith(option + "="):
            return token.partition("=")[2]
    return ""


class CommandLine:
    """One reading of the command line, by argparse and by us.

    Attributes:
        parsed: values of our flags, where each value came from, and what is wrong; None before `extend`.
    """

    def __init__(self, argv: Sequence[str], registry: Registry) -> None:
        """Remember what to read: the arguments without the program's name."""
        self.parsed: ParsedArguments | None = None
        self._argv = list(argv)
        self._registry = registry
        self._flags = FlagSet(registry)
        self._foreign: frozenset[str] = frozenset()

    @property
    def provenance(self) -> Mapping[str, str]:
        """Origin of each value: ``"flag --x"``, ``"preset NAME"`` or ``"default"``."""
        return self.parsed.provenance if self.parsed is not None else {}

    @property
    def wants_help(self) -> bool:
        """``--help`` is given: the parser prints it and leaves."""
        return self.parsed is not None and self.parsed.wants_help

    def extend(self, parser: ArgumentParser) -> None:
        """Give a parser our flags; its own are complete."""
        theirs = options_of(parser)
        flags = self._flags = FlagSet(self._registry)
        flags.host = NAME
        for flag in flags_of(parser):
            flags.add(flag, _OWNER, _OWNER)
        for flag in CORE_FLAGS:
            if flag.name == "--platform":
                flag = replace(flag, choices=("auto", *self._registry.platform_names()))
            flags.add(flag, CORE_OWNER, CORE_OWNER)
        flags.add_features(self._registry)
        groups: dict[str, Any] = {}
        for entry in flags.entries:
            if theirs.isdisjoint(entry.flag.options):
                if entry.heading not in groups:
                    groups[entry.heading] = parser.add_argument_group(_escape(entry.heading))
                _add(groups[entry.heading], entry)
            elif entry.adoptions:
                _adopt(parser, entry)
        self.parsed = flags.parse(self._argv)
        self._foreign = theirs

    @property
    def rewritten(self) -> list[str] | None:
        """The arguments without flags that change nothing, and with translations; None where all stay."""
        if self.parsed is None or self.wants_help or not self.parsed.flag_notes:
            return None
        return list(self.parsed.argv)

    def check(self) -> None:
        """Refuse what is wrong with our flags, and flags that nobody has.

        Raises:
            PlanError: carries every problem.
        """
        assert self.parsed is not None
        problems = [problem for problem in self.parsed.problems if self._is_ours(problem)]
        if problems:
            raise PlanError(problems)

    def _is_ours(self, problem: Problem) -> bool:
        if problem.code == "E-FLAG-VALUE":
            # argparse judges its own flags; the choices of one that a feature extended are in it too.
            return problem.flag in self._flags and self._flags[problem.flag].owner != _OWNER
        # A short option, or one with an unusual name, is in no `FlagSet`.
        return problem.code != "E-UNKNOWN-FLAG" or problem.flag not in self._foreign

    def fill(self, args: Any) -> None:
        """Put our values into Megatron-LM's arguments, which may come from a file and lack them."""
        assert self.parsed is not None
        for entry in self._flags.entries:
            dest = entry.flag.dest
            if entry.owner != _OWNER or self.provenance.get(dest, "").startswith("preset "):
                setattr(args, dest, getattr(self.parsed.args, dest))

    def __str__(self) -> str:
        """Return the command line as one would type it."""
        return shlex.join(self._argv)


def _add(group: Any, entry: FlagEntry) -> None:
    flag = entry.flag
    options: dict[str, Any] = {"dest": flag.dest, "default": flag.default}
    options["help"] = _escape(" ".join((flag.help, *entry.notes)))
    if flag.is_switch:
        options["action"] = "store_false" if flag.inverts else "store_true"
    else:
        # Values are read by `FlagSet`, whose messages know features.
        options |= {"nargs": flag.nargs, "metavar": flag.metavar}
    group.add_argument(*flag.options, **options)


def _adopt(parser: ArgumentParser, entry: FlagEntry) -> None:
    """Let Megatron-LM's action accept what features add to its flag, and its help say so."""
    action = parser._option_string_actions[next(o for o in entry.flag.options if o in options_of(parser))]
    if action.choices is not None and entry.flag.choices:
        known = list(action.choices)
        action.choices = [*known, *(choice for choice in entry.flag.choices if choice not in known)]
    said = " ".join((*entry.notes, *adopted_help(entry)))
    action.help = f"{action.help or ''} {_escape(said)}"


def _escape(text: str) -> str:
    return text.replace("%", "%%")

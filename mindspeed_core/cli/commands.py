"""Sub-commands that packages add to the programs.

Names come from metadata alone; a command is imported when it runs. A broken one fails alone, with its name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import click

from mindspeed_core.discovery.entry_points import COMMANDS, Installed, Source, broken
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.errors import UserError

if TYPE_CHECKING:
    from mindspeed_core.registry import Registry

TRAIN_PROGRAM = "mindspeed-train"
TRAIN_WORDS = ("help", "completion")
"""Words that mean something to ``mindspeed-train`` itself."""


def train_words(registry: Registry) -> set[str]:
    """Return the first words that ``mindspeed-train`` and its host understand; the host may be absent."""
    if DEFAULT_HOST not in registry.host_names():
        return {*TRAIN_WORDS}
    return {*TRAIN_WORDS, *registry.host(DEFAULT_HOST).commands}


def load_own(name: str, where: str) -> click.Command:
    """Import a sub-command that ``mindspeed-features`` lists itself.

    Args:
        name: the sub-command.
        where: its module, which has an attribute ``command``, or the distribution that brings it through the
            entry-point group ``mindspeed.commands``.

    Raises:
        UserError: that distribution is not installed, or its command cannot be loaded.
    """
    if "-" not in where:
        command: click.Command = import_module(where).command
        return command
    brought = [claim for claim in added_commands(COMMANDS).get(name, ()) if claim.dist == where]
    if not brought:
        raise UserError(f"mindspeed-features {name} comes with {where}: pip install {where}")
    return load_added(name, brought)


def added_commands(
    group: str, own: Collection[str] = (), installed: Installed | None = None
) -> dict[str, list[Source]]:
    """Return the sub-commands of an entry-point group with everybody who claims each.

    Args:
        group: the entry-point group of a program.
        own: names of the program itself, which nobody else gets.
        installed: entry points that were read already; by default they are read now.
    """
    claims: dict[str, list[Source]] = {}
    for source in (installed or Installed()).sources(group):
        if source.name not in own:
            claims.setdefault(source.name, []).append(source)
    return claims


def origin(claims: Sequence[Source]) -> str:
    """Return distribution and version of whoever brings a sub-command."""
    return " and ".join(f"{source.dist} {source.version}" for source in claims)


def load_added(name: str, claims: Sequence[Source]) -> click.Command:
    """Import a sub-command that a package adds.

    Raises:
        UserError: several packages claim the name, or it cannot be loaded.
    """
    if len(claims) > 1:
        raise UserError(f"sub-command {name!r} is claimed by {origin(claims)}; uninstall one of them")
    source = claims[0]
    try:
        command = source.load()
        if not isinstance(command, click.Command):
            raise TypeError(f"{source.value} is no click command")
    except (Exception, SystemExit) as error:
        record = broken(source, error)
        raise UserError(
            f"sub-command {name!r} of {origin(claims)} cannot be loaded: {record.error}\n"
            f"    -> {record.remedy}"
        ) from error
    return command


def suggestion(name: str, candidates: Sequence[str]) -> str:
    """Return what may have been meant by an unknown sub-command: similar names, or all."""
    from difflib import get_close_matches

    close = get_close_matches(name, candidates, n=3)
    return f"Did you mean {' or '.join(close)}?" if close else f"There are: {', '.join(candidates)}."

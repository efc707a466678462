"""``mindspeed-features migrate``: what becomes of a launch script here, flag by flag, and the new command."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mindspeed_core.errors import UserError
from mindspeed_core.terminal.errors import EXIT_PROBLEMS
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.listing import say
from mindspeed_core.terminal.training_flags import UNPROCESSED_FLAGS, host_option, training_flags

if TYPE_CHECKING:
    from mindspeed_core.flags.flag_set import FlagSet
    from mindspeed_megatron.migrate.report import Migration
    from mindspeed_megatron.migrate.script import Launch

_LARGEST = 1 << 20


@click.command(
    "migrate",
    short_help="Say what becomes of a launch script, flag by flag.",
    context_settings=UNPROCESSED_FLAGS,
)
@host_option
@click.option("--launch", "number", type=int, default=1, show_default=True, help="Which of its commands.")
@click.option(
    "--write", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write a new script there."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@training_flags
@click.pass_context
def command(
    context: click.Context,
    host: str,
    number: int,
    target: Path | None,
    as_json: bool,
    flags: tuple[str, ...],
) -> None:
    """Say what becomes of SCRIPT.sh, or of the flags behind --: used, noted, translated or refused.

    The script is read and never run. What only running could tell is named, and stays as it is written.
    A variable that is set nowhere is nothing, as in the shell, and is named too. Exit status 1 where the
    command does not start as it is.

    \b
    mindspeed-features migrate pretrain.sh --write new.sh
    mindspeed-features migrate -- --num-layers 4 --distributed-backend nccl
    """
    from mindspeed_core.flags.flag_set import flag_set
    from mindspeed_core.registry import Registry
    from mindspeed_megatron.migrate.report import command_of, migration_of, shown_command

    registry = Registry.discover()
    launch = _without_empty_words(_launch(flags, number), flag_set(registry, host))
    words = _with_files(launch.flags, flag_set(registry, host))
    found = migration_of(words, host, "auto", registry, launch.program)
    new = command_of(found.argv, launch.launcher, launch.program, host)
    text = shown_command(new, launch.expressions)
    if target is not None:
        _write(target, launch, text)
    if as_json:
        emit(json.dumps(_as_json(found, launch, new), indent=2))
    else:
        _print(found, launch, text, target)
    if not found.ok or launch.unresolved:
        context.exit(EXIT_PROBLEMS)


def _launch(flags: tuple[str, ...], number: int) -> Launch:
    """Return the command that is meant: that of a script, or the flags themselves."""
    from mindspeed_megatron.migrate.programs import trainings
    from mindspeed_megatron.migrate.script import Launch, launches_of

    if not flags:
        raise click.UsageError("Name a script, or type flags behind --.")
    if flags[0].startswith("-"):
        return Launch(0, (), "mindspeed-train", flags)
    if len(flags) > 1:
        raise click.UsageError(
            f"{flags[1]!r} stands behind the script; type flags behind -- without a script."
        )
    path = Path(flags[0])
    if path.suffix in (".yaml", ".yml"):
        return Launch(0, (), "mindspeed-train", ("--yaml-cfg", str(path)))
    launches, others = trainings(launches_of(_read(path)))
    if others and not launches:
        raise UserError(f"{path}: {others[0]}")
    if not launches:
        raise UserError(
            f"{path}: has no command that starts a training (python or torchrun with a script, or "
            "mindspeed-train); type its flags behind --"
        )
    if not 1 <= number <= len(launches):
        places = ", ".join(str(launch.line) for launch in launches)
        raise UserError(f"--launch {number}: {path} has {len(launches)} commands, in lines {places}")
    if len(launches) > 1:
        lines = ", ".join(f"{at} in line {launch.line}" for at, launch in enumerate(launches, start=1))
        emit(f"{path} starts {len(launches)} trainings, {lines}: this is {number} (--launch)", err=True)
    return launches[number - 1]


def _without_empty_words(launch: Launch, known: FlagSet) -> Launch:
    """Leave out the variables that are nothing in the shell, and say so of each."""
    from mindspeed_megatron.migrate.empty_words import without_empty_words

    kept, empty = without_empty_words(launch.flags, launch.unset, known)
    left_out = [f"{word} {launch.reason_for(word)}" for word in empty]
    sentences = tuple(s for s in launch.unresolved if not any(f"{said};" in s for said in left_out))
    return replace(
        launch, flags=kept, unresolved=sentences, left_out=tuple(dict.fromkeys((*launch.left_out, *left_out)))
    )


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST:
            raise UserError(f"{path}: is larger than a script of a person")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: is no text in UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


def _with_files(words: tuple[str, ...], flag_set: FlagSet) -> list[str]:
    """Put the arguments of a YAML file in the place of ``--yaml-cfg``."""
    from mindspeed_megatron.migrate.yaml_arguments import flags_of_file

    found: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, inline = word.partition("=")
        if name == "--yaml-cfg" and (equals or rest):
            found += flags_of_file(Path(inline if equals else rest.pop(0)), flag_set)
        else:
            found.append(word)
    return found


def _write(target: Path, launch: Launch, text: str) -> None:
    from mindspeed_megatron.migrate.report import quoted

    exports = "".join(
        f"export {name}={quoted(value, launch.expressions)}\n" for name, value in launch.exports
    )
    try:
        with target.open("x", encoding="utf-8", newline="\n") as file:
            file.write(f"#!/usr/bin/env bash\nset -e\n{exports}{text}\n")
    except FileExistsError:
        raise UserError(f"--write {target}: is there already; name another file") from None
    except OSError as error:
        raise UserError(f"--write {target}: cannot be written ({error.strerror or error})") from None


def _print(found: Migration, launch: Launch, text: str, target: Path | None) -> None:
    from mindspeed_megatron.upstream.verdicts import NOTED, REFUSED, TRANSLATED, USED

    headings = {
        REFUSED: "refused: without it the run would be another one",
        TRANSLATED: "translated",
        NOTED: "noted: changes nothing here",
        USED: "used",
    }
    for verdict, heading in headings.items():
        flags = [flag for flag in found.flags if flag.verdict == verdict]
        if not flags:
            continue
        emit(f"{heading} ({len(flags)})")
        if verdict == USED:
            owners: dict[str, list[str]] = {}
            for flag in flags:
                owners.setdefault(flag.text, []).append(flag.flag.partition(" ")[0])
            for owner, options in owners.items():
                say(f"{owner}: {' '.join(options)}", indent=2, hang=2)
            continue
        for flag in flags:
            say(f"{flag.flag}: {flag.text}", indent=2, hang=2)
            if flag.remedy:
                emit(f"    -> {flag.remedy}")
    if found.problems:
        emit(f"do not go together ({len(found.problems)})")
        for problem in found.problems:
            emit(f"  {problem}")
    if launch.left_out:
        emit(f"left out: nothing, unless the environment sets it ({len(launch.left_out)})")
        for sentence in launch.left_out:
            say(sentence, indent=2, hang=2)
    if launch.unresolved:
        emit(f"not resolved ({len(launch.unresolved)})")
        for sentence in launch.unresolved:
            say(sentence, indent=2, hang=2)
    if found.packages:
        emit(f"\npip install 'mindspeed-core[train]' {' '.join(found.packages)}")
    emit(f"\nwritten to {target}" if target is not None else f"\n{text}")


def _as_json(found: Migration, launch: Launch, new: tuple[str, ...]) -> dict[str, object]:
    return {
        "ok": found.ok and not launch.unresolved,
        "flags": [asdict(flag) for flag in found.flags],
        "problems": [asdict(problem) for problem in found.problems],
        "unresolved": list(launch.unresolved),
        "left_out": list(launch.left_out),
        "packages": list(found.packages),
        "command": list(new),
    }

"""Files of prompts and of answers, one a line; broken lines are named, and no answer is written twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mindspeed_core.errors import NamedFileError
from mindspeed_models.inference.requests import GenerationSettings

_PROMPTS, _ANSWERS = "--prompt-file", "--output"
_FORMS = ("prompt", "ids", "messages")
_SETTINGS = {one.name for one in fields(GenerationSettings)}
_KNOWN = {*_FORMS, "id", "adapter", "settings"}


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file or of the command line.

    Attributes:
        name: what its answer is called by.
        content: text, ids or messages.
        number: from 0; part of the seed of its drawing.
        adapter: name of the adapter; None for the first.
        settings: that differ from those of all.
    """

    name: str
    content: Any
    number: int
    adapter: str | None = None
    settings: Mapping[str, Any] | None = None

    def settings_with(self, common: GenerationSettings) -> GenerationSettings:
        """Return the settings of all, with the prompt's own."""
        return replace(common, **dict(self.settings)) if self.settings else common


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts: a text in each line, or a JSON object where the file's name ends in ``.jsonl``.

    An object has ``prompt`` (text), ``ids`` or ``messages``, and may have ``id``, ``adapter``, ``settings``.

    Raises:
        NamedFileError: the file or a line of it cannot be used; names both.
    """
    try:
        # Not by splitlines, for which other characters than the end of a line end one, too.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise NamedFileError(_PROMPTS, str(path), f"cannot be read ({error})", "check it") from error
    objects = path.suffix == ".jsonl"
    found = []
    for number, line in enumerate(line for line in enumerate(lines, start=1) if line[1].strip()):
        at, text = line
        found.append(_prompt(f"{path}:{at}", text, number) if objects else Prompt(str(number), text, number))
    if not found:
        raise NamedFileError(_PROMPTS, str(path), "holds no prompt", "write one in each line")
    names = [each.name for each in found]
    twice = (
        next((name for name in names if names.count(name) > 1), None)
        if len(set(names)) < len(names)
        else None
    )
    if twice is not None:
        raise NamedFileError(_PROMPTS, str(path), f"has the id {twice!r} twice", "give each line its own")
    return found


def _prompt(where: str, line: str, number: int) -> Prompt:
    def refuse(reason: str, remedy: str) -> NamedFileError:
        return NamedFileError(_PROMPTS, where, reason, remedy)

    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise refuse(f"is no JSON ({error})", "correct the line") from error
    if not isinstance(record, dict):
        raise refuse("is no object", 'write {"prompt": "..."}')
    unknown = sorted(record.keys() - _KNOWN)
    if unknown:
        raise refuse(f"has the unknown key {unknown[0]!r}", f"use {', '.join(sorted(_KNOWN))}")
    forms = [form for form in _FORMS if record.get(form) is not None]
    if len(forms) != 1:
        raise refuse("has none or several of prompt, ids and messages", "give one of them")
    content, kinds = record[forms[0]], {"prompt": str, "ids": list, "messages": list}
    if not isinstance(content, kinds[forms[0]]) or not content:
        raise refuse(f"{forms[0]!r} is empty or no {kinds[forms[0]].__name__}", "correct the line")
    settings = record.get("settings") or {}
    wrong = sorted(settings.keys() - _SETTINGS) if isinstance(settings, dict) else ["settings"]
    if wrong:
        raise refuse(f"has the unknown setting {wrong[0]!r}", f"use {', '.join(sorted(_SETTINGS))}")
    for name in ("stop", "eos_token_ids"):
        if isinstance(settings.get(name), list):
            settings[name] = tuple(settings[name])
    return Prompt(str(record.get("id", number)), content, number, record.get("adapter"), settings)


def answered(path: Path, wanted: Mapping[str, int], *, cut: bool = True) -> set[str]:
    """Return the names of prompts that a file of answers has, and cut off what an interruption left.

    That is a last line without end, and lines of the last prompt where some of its answers are missing.

    Args:
        path: the file.
        wanted: how many lines each prompt has, by its name.
        cut: change the file; one rank of several does.

    Raises:
        NamedFileError: a line is no answer.
    """
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content.rpartition(b"\n")[0]
    kept = len(whole) + 1 if whole or content.startswith(b"\n") else 0
    lines = [line + b"\n" for line in content[:kept].split(b"\n")[:-1]]
    names = []
    for at, line in enumerate(lines, start=1):
        try:
            names.append(str(json.loads(line)["id"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise NamedFileError(
                _ANSWERS, f"{path}:{at}", "is no answer of generate", "name another file"
            ) from error
    last = names[-1] if names else ""
    if names and names.count(last) < wanted.get(last, 1):
        while names and names[-1] == last:
            names.pop()
            kept -= len(lines.pop())
    if cut and kept < len(content):
        os.truncate(path, kept)
    return set(names)


def parts(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    """Yield so many prompts at a time."""
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]

"""Options of a dump: a JSON file in msprobe's form, of which our own dump reads a part. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError

_FLAG = "--npu-datadump"


@dataclass(frozen=True)
class DumpOptions:
    """The choices of one run.

    Attributes:
        path: folder of the dump.
        steps: steps that are dumped, counted from 0 over the whole training; empty for the first of the run.
        ranks: ranks that dump; empty for all.
        modules: parts of names of modules that are dumped; empty for all.
        config: the file; None without one.
    """

    path: Path = Path("datadump")
    steps: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()
    config: Path | None = None


def read_options(given: Sequence[str]) -> DumpOptions:
    """Read the file behind ``--npu-datadump``, if one is named.

    Its keys are those of msprobe's ``config.json``: ``dump_path``, ``step``, ``rank``, and ``list`` (parts of
    names of modules) under ``statistics`` or at the top. Others are msprobe's alone.

    Raises:
        UserError: the file cannot be read, or has no such form.
    """
    if not given:
        return DumpOptions()
    path = Path(given[0])
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{_FLAG} {path}: {error.strerror}; name a JSON file, or none") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{_FLAG} {path} is no JSON file ({error}); see msprobe's config.json") from error
    if not isinstance(content, dict):
        raise UserError(f'{_FLAG} {path}: an object is expected, {{"dump_path": …, "step": [0]}}')
    statistics = content.get("statistics", {})
    names = content.get("list") or (statistics.get("list") if isinstance(statistics, dict) else None) or []
    folder = content.get("dump_path") or "datadump"
    if not isinstance(folder, str):
        raise UserError(f"{_FLAG} {path}: dump_path {folder!r} is no path; name a folder")
    return DumpOptions(
        Path(folder),
        _numbers(path, "step", content.get("step") or []),
        _numbers(path, "rank", content.get("rank") or []),
        _texts(path, names),
        path,
    )


def _numbers(path: Path, key: str, values: Any) -> tuple[int, ...]:
    """Return numbers and ranges (``"2-5"``, both ends included) of a list."""
    if not isinstance(values, list):
        raise UserError(f"{_FLAG} {path}: {key} {values!r} is no list; write [0, 1]")
    found: list[int] = []
    for value in values:
        first, dash, last = str(value).partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or isinstance(value, (bool, float)):
            raise UserError(f'{_FLAG} {path}: {key} holds {value!r}; write numbers from 0 on, or "2-5"')
        found += range(int(first), int(last if dash else first) + 1)
    return tuple(found)


def _texts(path: Path, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(f"{_FLAG} {path}: list {values!r} is no list of names of modules")
    return tuple(values)

"""Dumps of a run read back: the entries of every rank, with its place in the layout. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError

_NAME = re.compile(r"rank(\d{5,})\.jsonl")
_KEYS = frozenset({"step", "module", "pass", "call", "tensor", "shape", "nan", "inf", "l2", "crc32"})


@dataclass(frozen=True)
class RankDump:
    """The dump of a rank.

    Attributes:
        rank: in the world.
        layout: rank and size of each dimension: ``{"tp": [1, 2]}``.
        entries: in the order in which the rank wrote them.
        cut: the last line is not whole: the run ended, or its disk was full.
    """

    rank: int
    layout: Mapping[str, tuple[int, int]]
    entries: tuple[Mapping[str, Any], ...]
    cut: bool

    def place(self, dimension: str) -> tuple[int, int]:
        """Return rank and size of a dimension; one of one where it is not known."""
        return self.layout.get(dimension, (0, 1))


def read_dump(folder: Path) -> list[RankDump]:
    """Read every rank's dump of a folder.

    Raises:
        UserError: there is none, or a file is no dump.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name what --npu-datadump wrote, ./datadump by default")
    files = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    if not files:
        raise UserError(f"{folder} holds no rank00000.jsonl; name a folder that --npu-datadump wrote")
    return [_read_rank(path) for path in files]


def _read_rank(path: Path) -> RankDump:
    entries: list[Mapping[str, Any]] = []
    cut = False
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not text.endswith("\n"):
                cut = True
                break
            raise UserError(
                f"{path}, line {number} is no JSON ({error}): no dump of --npu-datadump"
            ) from error
        if not isinstance(entry, dict):
            raise UserError(f"{path}, line {number}: no dump of --npu-datadump")
        entries.append(entry)
    if not entries or not isinstance(entries[0].get("layout"), dict):
        raise UserError(f"{path} does not begin with a layout: it is empty, or no dump of --npu-datadump")
    for number, entry in enumerate(entries[1:], start=2):
        if not set(entry) >= _KEYS:
            missing = ", ".join(sorted(_KEYS - set(entry)))
            raise UserError(f"{path}, line {number} lacks {missing}: no dump of --npu-datadump")
    layout = {name: (int(place[0]), int(place[1])) for name, place in entries[0]["layout"].items()}
    return RankDump(int(entries[0].get("rank", 0)), layout, tuple(entries[1:]), cut)

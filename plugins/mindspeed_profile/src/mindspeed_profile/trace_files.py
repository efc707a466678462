"""Traces of torch's profiler read back: the events of a rank, and the names of its groups. No torch."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError

_SUFFIXES = (".pt.trace.json.gz", ".pt.trace.json")


@dataclass(frozen=True)
class Trace:
    """The trace of a rank.

    Attributes:
        path: of the file.
        rank: in the world.
        world_size: ranks of the world.
        groups: description of each process group by its name.
        events: what took time: those with a duration.
    """

    path: Path
    rank: int
    world_size: int
    groups: Mapping[str, str]
    events: Sequence[Mapping[str, Any]]


def read_traces(folder: Path) -> list[Trace]:
    """Read every trace of a folder.

    Raises:
        UserError: there is none, or a file is cut short, or no trace of torch's profiler.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name what --profile wrote, ./profile_dir by default")
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(_SUFFIXES))
    if not paths:
        raise UserError(f"{folder} holds no *{_SUFFIXES[0]}; name a folder that --profile wrote")
    return [_read(path) for path in paths]


def _read(path: Path) -> Trace:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = json.load(file)
    except (EOFError, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path} is cut short, or was never written whole ({error}); record it anew"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is no trace of torch's profiler ({error})") from error
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise UserError(f"{path} is no trace of torch's profiler: it has no traceEvents")
    info = content.get("distributedInfo") or {}
    groups = {str(one.get("pg_name")): str(one.get("pg_desc")) for one in info.get("pg_config") or ()}
    timed = [one for one in events if isinstance(one, dict) and one.get("ph") == "X" and _has_times(one)]
    return Trace(path, int(info.get("rank", 0)), int(info.get("world_size", 1)), groups, timed)


def _has_times(event: Mapping[str, Any]) -> bool:
    return all(isinstance(event.get(name), (int, float)) for name in ("ts", "dur"))

"""Published builds of torch_npu, and the calls of a source that some of them do not take.

The record beside this file was read from the wheels by ``tools/torch_npu_builds.py``. A source may make a
call that a build lacks where it asks first, by ``call_missing("npu_x", "argument")``,
``kernel_of(calls=("npu_x",), arguments=…)`` or ``hasattr(module, "x")``, whose text is read here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from mindspeed_megatron.devices.torch_npu_uses import ApiUse, api_uses, guards

_ANY = "*"


@dataclass(frozen=True)
class Unserved:
    """A call that builds do not take, and that nothing asks for first.

    Attributes:
        use: the call.
        lacking: arguments that are not taken; empty where the name itself is absent.
        builds: that lack it.
    """

    use: ApiUse
    lacking: tuple[str, ...]
    builds: tuple[str, ...]

    def __str__(self) -> str:
        """Return one line: place, name, what is lacking, and where."""
        lack = f"takes no {', '.join(self.lacking)}" if self.lacking else "is absent"
        return f"{self.use} {lack} in torch_npu {', '.join(self.builds)}, and nothing asks first"


@cache
def published() -> tuple[str, ...]:
    """Return the recorded builds, oldest first."""
    return tuple(_record()["builds"])


def unserved(folders: Sequence[Path]) -> list[Unserved]:
    """Return the calls in the Python files below folders that some recorded build would refuse.

    A name that is not recorded counts as absent everywhere: record it with ``tools/torch_npu_builds.py``.
    """
    asked = guards(folders)
    found = []
    for use in api_uses(folders):
        short = use.name.rpartition(".")[2]
        by_reason: dict[tuple[str, ...], list[str]] = {}
        for build, lacking in _lacking(use):
            if short in asked and set(lacking) <= asked[short]:
                continue
            by_reason.setdefault(lacking, []).append(build)
        found += [Unserved(use, lacking, tuple(builds)) for lacking, builds in by_reason.items()]
    return found


def _lacking(use: ApiUse) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the builds that do not take a call, with the arguments that they lack."""
    forms = {
        build: form["arguments"] for form in _record()["names"].get(use.name, ()) for build in form["builds"]
    }
    for build in published():
        taken = forms.get(build)
        if taken is None:
            yield build, ()
        elif _ANY not in taken:
            lacking = tuple(name for name in use.keywords if name not in taken)
            if lacking:
                yield build, lacking
            elif use.is_call and use.positional > len(taken):
                yield build, (f"more than {len(taken)} arguments",)


@cache
def _record() -> dict[str, Any]:
    text = files("mindspeed_testing.npu").joinpath("builds.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found

"""Converts or exports in forked processes that are killed, each at another moment, and goes on after each.

``python killed_work.py KIND SOURCE FOLDER EVERY FIRST`` kills at every EVERY-th moment from FIRST on, and
prints what was wrong. A moment is whatever the operating system is asked to do with a file of the result:
make, open, rename, remove it; and each piece of a tensor that is written. One process imports, the others are
its forks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.flags.flag_set import known_flags
from mindspeed_core.registry import Registry
from mindspeed_models.config_file import read_config
from mindspeed_models.families import family_of
from mindspeed_models.weights import convert as converting
from mindspeed_models.weights.convert import Conversion, convert
from mindspeed_models.weights.export import Export, export
from mindspeed_models.weights.hf_files import HfFiles
from mindspeed_models.weights.legacy import LegacyLayout
from mindspeed_models.weights.legacy_write import write_legacy
from mindspeed_models.weights.reader import TableReader
from mindspeed_models.weights.unfinished import DigestedFile

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}
PIECE = 1024
"""Bytes of a write that is a moment: what is around a tensor is less."""
REFUSED = 3
TRACKER = "latest_checkpointed_iteration.txt"


class Moments:
    """Counts moments, and ends the process at one of them."""

    def __init__(self, folder: Path, last: int) -> None:
        self.count = 0
        self._folder, self._last = str(folder), last
        sys.addaudithook(self._saw)
        plain = DigestedFile.write

        def write(file: DigestedFile, content: Any) -> None:
            if len(content) >= PIECE:
                self.pass_one()
            plain(file, content)

        DigestedFile.write = write  # type: ignore[method-assign]

    def pass_one(self) -> None:
        """Count one."""
        self.count += 1
        if self.count == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def _saw(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and any(
            isinstance(each, (str, os.PathLike)) and os.fspath(each).startswith(self._folder)
            for each in arguments
        ):
            self.pass_one()


def to_checkpoint(source: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Convert in small parts."""
    converting._PART_BYTES = 16384
    config = read_config(source)
    recipe = family_of(config)
    convert(
        Conversion(
            source, folder / "out", recipe, recipe.make_plan(config), resume=True, chunk_bytes=8192, say=say
        )
    )


def to_files(source: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Export into several files."""
    config = read_config(source / "iter_0000000/hf")
    recipe = family_of(config)
    options = Export(source, folder / "out", recipe, recipe.make_plan(config), config)
    export(Export(**{**vars(options), "shard_bytes": 30_000, "resume": True, "say": say}))


def to_older(source: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Write files of each rank."""
    config = read_config(source)
    recipe = family_of(config)
    plan = recipe.make_plan(config)
    with HfFiles(source) as files:
        write_legacy(TableReader(files, recipe, plan, plan), plan, folder / "out", LegacyLayout(2, 2))


ACTIONS = {"convert": to_checkpoint, "export": to_files, "older": to_older}
RESULTS = {"convert": "out/iter_0000000", "export": "out", "older": "out/release"}


def forked(kind: str, source: Path, folder: Path, last: int) -> tuple[int, dict[str, Any]]:
    """Work in a fork that is killed at a moment; return its status and what it tells."""
    folder.mkdir(exist_ok=True)
    told = folder / "told.json"
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            said: list[str] = []
            moments = Moments(folder / "out", last)
            ACTIONS[kind](source, folder, said.append)
            told.write_text(json.dumps({"moments": moments.count, "said": said}))
            status = 0
        except UserError as error:
            told.write_text(json.dumps({"refused": str(error)}))
            status = REFUSED
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    status = -os.WTERMSIG(ended) if os.WIFSIGNALED(ended) else os.WEXITSTATUS(ended)
    return status, json.loads(told.read_text()) if told.exists() else {}


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a result."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in paths}


def main(kind: str, source: Path, root: Path, every: int, first: int) -> dict[str, Any]:
    """Kill, look, go on, and compare with work that was left alone."""
    # Imports what each conversion looks at, so that no fork does it anew.
    known_flags(Registry.discover(), "standalone")
    status, told = forked(kind, source, root / "alone", 0)
    assert status == 0, told
    expected, count = digests(root / "alone" / RESULTS[kind]), told["moments"]
    wrong: list[str] = []
    reused = 0
    for last in range(first, count + 1, every):
        folder = root / f"at-{last}"
        status, _ = forked(kind, source, folder, last)
        if status != -signal.SIGKILL:
            wrong.append(f"moment {last}: ended with {status}")
        result = folder / RESULTS[kind]
        whole = result.exists()
        if whole and digests(result) != expected:
            wrong.append(f"moment {last}: half a result has the name of a whole one")
        status, told = forked(kind, source, folder, 0)
        reused += sum("finished earlier" in each for each in told.get("said", ()))
        refused = told.get("refused", "")
        # A folder that is whole is not written again; a checkpoint is only named.
        if status != 0 and not (whole and kind != "convert" and status == REFUSED and "already" in refused):
            wrong.append(f"moment {last}: going on ended with {status} {refused}")
        if digests(result) != expected:
            wrong.append(f"moment {last}: other bytes after going on")
        if kind != "export" and not (folder / "out" / TRACKER).is_file():
            wrong.append(f"moment {last}: nothing names the result")
    return {"moments": count, "wrong": wrong, "reused": reused}


if __name__ == "__main__":
    kind, source, folder, *numbers = sys.argv[1:]
    print(json.dumps(main(kind, Path(source), Path(folder), *map(int, numbers))))

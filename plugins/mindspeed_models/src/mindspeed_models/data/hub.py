"""Records that the library ``datasets`` reads: data sets by name, streams, and what ``load_dataset`` takes.

One process reads records in blocks, the others tokenize them. A block is a part: what an interrupted run had
finished is read again, and not tokenized again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from typing import Any

from mindspeed_core.errors import ArgumentError, DataError, NamedFileError, UserError
from mindspeed_core.terminal.foreign_text import first_line
from mindspeed_models.data.records import Record
from mindspeed_models.data.samples import DONE, Opened, Preprocessing
from mindspeed_train.interface import Part, Segment, read_named_file

PARAMS = "--hf-datasets-params"
BLOCK = 2000


def read_params(path: str) -> dict[str, Any]:
    """Read the keyword arguments of ``load_dataset`` from a file.

    Raises:
        NamedFileError: it is no JSON object, or names a program.
    """
    try:
        found = json.loads(read_named_file(PARAMS, path, "check the path"))
    except (ValueError, RecursionError) as error:
        remedy = 'write for example {"path": "FOLDER", "split": "train"}'
        raise NamedFileError(PARAMS, path, f"is no JSON ({error})", remedy) from error
    if not isinstance(found, dict) or not isinstance(found.get("path"), str):
        raise NamedFileError(
            PARAMS, path, "is no object with a path", 'write {"path": "NAME", "split": "train"}'
        )
    if found.get("trust_remote_code") or found["path"].endswith(".py"):
        reason = "asks for a program that would load the data, which is not run here"
        raise NamedFileError(PARAMS, path, reason, "name data without one")
    return {"split": "train", **found}


class HubSource:
    """Makes the parts of a data set that ``load_dataset`` opens."""

    def __init__(self, params: Mapping[str, Any], work: Preprocessing) -> None:
        """Open the data set.

        Raises:
            UserError: the library is missing, or it cannot open the data set.
        """
        self._work, self._params = work, params
        try:
            datasets: Any = import_module("datasets")
        except ImportError as error:
            raise UserError(
                f"{PARAMS}, and names of data sets, need a library that is not installed; run "
                "pip install 'mindspeed-models[data]'"
            ) from error
        datasets.disable_progress_bars()
        try:
            self._records = datasets.load_dataset(**params)
        except Exception as error:
            # Whatever goes wrong in it: names, columns, connections.
            reason = f"datasets cannot load it ({first_line(error)})"
            raise ArgumentError(
                PARAMS, json.dumps(dict(params)), reason, "check its path and split"
            ) from error
        if isinstance(self._records, (dict, datasets.IterableDatasetDict)):
            remedy = f'add "split", one of {", ".join(self._records)}'
            raise ArgumentError(PARAMS, json.dumps(dict(params)), "names no split", remedy)

    def make(self, workers: int) -> tuple[list[Part], int]:
        """Make all parts; return them, and how many were there."""
        parts: list[Part] = []
        reused = 0
        if workers == 1:
            opened = self._work.open()
            for part, records in self._blocks():
                parts.append(part)
                if self._work.path(part, DONE).is_file():
                    reused += 1
                else:
                    self._work.write(part, opened, [records])
            return parts, reused
        pool = ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=_start, initargs=(self._work,)
        )
        running: set[Future[str]] = set()
        try:
            for part, records in self._blocks():
                parts.append(part)
                if self._work.path(part, DONE).is_file():
                    reused += 1
                    continue
                running.add(pool.submit(_write, part, records))
                if len(running) > 2 * workers:
                    running = _checked(running)
            while running:
                running = _checked(running)
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process died, probably for lack of memory; lower --workers and run the same "
                "command again: finished parts are kept"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
        return parts, reused

    def _blocks(self) -> Iterator[tuple[Part, list[Record]]]:
        fingerprint = getattr(self._records, "_fingerprint", "")
        source = json.dumps([dict(self._params), fingerprint], sort_keys=True)
        facts = json.dumps(self._work.facts, sort_keys=True)
        iterator = iter(self._records)
        number = 0
        while block := list(islice(iterator, BLOCK)):
            name = hashlib.sha256(f"{facts}\n{source}\n{number}".encode()).hexdigest()[:32]
            segment = Segment(str(self._params["path"]), number * BLOCK, None, len(block))
            yield Part(f"part-{name}", (segment,)), [Record(at, row) for at, row in enumerate(block, start=1)]
            number += 1


_worker: list[Any] = []


def _start(work: Preprocessing) -> None:
    _worker[:] = [work, work.open()]


def _write(part: Part, records: list[Record]) -> str:
    work: Preprocessing = _worker[0]
    opened: Opened = _worker[1]
    try:
        work.write(part, opened, [records])
    except UserError as error:
        return str(error)
    return ""


def _checked(running: set[Future[str]]) -> set[Future[str]]:
    done, rest = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        message = future.result()
        if message:
            raise DataError(message)
    return rest

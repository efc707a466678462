"""Preparation of a corpus: records in, ``.bin`` / ``.idx`` pairs out, the same for any number of workers.

The work is done in parts that survive a kill: a part that is finished is taken as it is when the same command
runs again. A pair of files appears under its name when it is complete, its index last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_core.errors import ArgumentError, DataError
from mindspeed_models.data.encoding import Counts
from mindspeed_models.data.hub import HubSource
from mindspeed_models.data.records import divide, first_places, input_files
from mindspeed_models.data.samples import (
    DOCUMENTS,
    DONE,
    LENGTHS,
    REJECTED,
    TOKENS,
    Preprocessing,
    dtypes_of,
)
from mindspeed_models.data.settings import Settings
from mindspeed_models.data.tokenizers import load_encoder
from mindspeed_train.interface import (
    Part,
    Progress,
    file_facts,
    finish_parts,
    locked,
    note_source,
    plan_parts,
    refuse_other_dataset,
    write_index,
)

PART_BYTES = 16 << 20
_FLAG = "--output-prefix"


@dataclass(frozen=True)
class Prepared:
    """A dataset that was written.

    Attributes:
        prefixes: of its ``.bin`` / ``.idx`` pairs.
        records: that were read.
        refused: records that were left out; they are in ``rejected``.
        rejected: the file that holds them; None where there are none.
        counts: what happened to samples.
        reused: parts that an earlier, interrupted run had finished.
        vocab_size: ids of the tokenizer.
    """

    prefixes: tuple[str, ...]
    records: int
    refused: int
    rejected: Path | None
    counts: Counts
    reused: int
    vocab_size: int


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    settings: Settings,
    *,
    hub: Mapping[str, Any] | None = None,
    workers: int = 1,
    max_bad_ratio: float = 1e-3,
    overwrite: bool = False,
    keep_parts: bool = False,
    part_bytes: int = PART_BYTES,
    progress: bool = False,
    on_part: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Turn records into the files that training reads.

    The result does not depend on ``workers``. An interrupted run leaves ``PREFIX.parts``, from which the same
    call goes on.

    Args:
        inputs: files and folders of records.
        output_prefix: where the pairs go, see `Settings.prefixes`.
        settings: what records become.
        hub: keyword arguments of ``datasets.load_dataset``, in place of ``inputs``.
        workers: number of processes that tokenize.
        max_bad_ratio: the largest share of records that may be refused.
        overwrite: replace a dataset of this prefix that was made of something else.
        keep_parts: leave the parts behind.
        part_bytes: about how much input a process takes at a time.
        progress: draw a progress bar on stderr.
        on_part: called with finished and all parts, as parts are finished.

    Raises:
        UserError: nothing to read, input or settings that cannot be used, or too many refused records.
    """
    if workers < 1:
        raise ArgumentError("--workers", workers, "must be at least 1", "use 1 or more")
    if not 0.0 <= max_bad_ratio <= 1.0:
        raise ArgumentError("--max-bad-ratio", max_bad_ratio, "is no share", "use a number from 0 to 1")
    handler = settings.check()
    encoder = load_encoder(settings.tokenizer)
    facts = settings.facts(encoder)
    prefixes = settings.prefixes(output_prefix, handler)
    files = [] if hub is not None else [file for given in inputs for file in input_files(given)]
    read: Any = hub if hub is not None else [[str(file), *file_facts(file)] for file in files]
    made_from = hashlib.sha256(json.dumps([facts, read], sort_keys=True).encode()).hexdigest()[:32]
    if not overwrite:
        refuse_other_dataset(output_prefix, made_from, [f"{prefix}.idx" for prefix in prefixes])
    folder = Path(f"{output_prefix}.parts")
    fields = settings.fields(handler)
    work = Preprocessing(str(folder), settings, facts, fields, dtypes_of(len(fields), settings, encoder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder), Progress(progress) as bar:
            if hub is not None:
                parts, reused = HubSource(hub, work).make(workers)
            else:
                parts = plan_parts(files, work, part_bytes, divide)
                bar.begin("tokenizing", sum(part.size for part in parts))
                done = 0

                def advance(size: int) -> None:
                    nonlocal done
                    done += 1
                    bar.advance(size)
                    if on_part is not None:
                        on_part(done, len(parts))

                reused = finish_parts(parts, work, workers, advance)
            found = _told(parts, work)
            rejected = _write_rejected(output_prefix, parts, work, found)
            records, refused = (sum(part[name] for part in found) for name in ("records", "refused"))
            _check_share(refused, records, max_bad_ratio, rejected)
            _publish(output_prefix, prefixes, parts, work, made_from)
            if not keep_parts:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{_FLAG} {output_prefix!r}: cannot be written ({error}); name a folder that can be written"
        ) from error
    counts = Counts()
    for part in found:
        counts.add(Counts(**part["counts"]))
    return Prepared(tuple(prefixes), records, refused, rejected, counts, reused, encoder.vocab_size)


def _told(parts: Sequence[Part], work: Preprocessing) -> list[dict[str, Any]]:
    return [json.loads(work.path(part, DONE).read_text()) for part in parts]


def _write_rejected(
    prefix: str, parts: Sequence[Part], work: Preprocessing, found: Sequence[Mapping[str, Any]]
) -> Path | None:
    """Write what was refused, with file and place, or remove what an earlier run wrote."""
    target = Path(f"{prefix}.rejected.jsonl")
    if not any(part["refused"] for part in found):
        target.unlink(missing_ok=True)
        return None
    segments = [segment for part in parts for segment in part.segments]
    before = iter(first_places(segments, [count for part in found for count in part["places"]]))
    with target.open("w", encoding="utf-8") as stream:
        for part in parts:
            starts = [next(before) for _ in part.segments]
            for line in work.path(part, REJECTED).read_text(encoding="utf-8").splitlines():
                told = json.loads(line)
                segment = told.pop("segment")
                told["place"] += starts[segment]
                stream.write(
                    json.dumps({"file": part.segments[segment].file, **told}, ensure_ascii=False) + "\n"
                )
    return target


def _check_share(refused: int, records: int, allowed: float, rejected: Path | None) -> None:
    if records == 0:
        raise DataError("--input: there is no record in it; name files that hold some")
    if refused <= allowed * records:
        return
    assert rejected is not None
    with rejected.open(encoding="utf-8") as stream:
        first = json.loads(stream.readline())
    raise DataError(
        f"{refused} of {records} records cannot be used, the first in {first['file']}, {first['place']}: "
        f"{first['reason']}; all are in {rejected}: correct them, or raise --max-bad-ratio {allowed:g}"
    )


def _publish(
    output_prefix: str, prefixes: Sequence[str], parts: Sequence[Part], work: Preprocessing, made_from: str
) -> None:
    """Join the parts into pairs; every index appears after all tokens are there."""
    temporary = [(Path(f"{prefix}.bin.tmp"), Path(f"{prefix}.idx.tmp")) for prefix in prefixes]
    try:
        for at, ((tokens, index), dtype) in enumerate(zip(temporary, work.dtypes)):
            lengths = [np.load(work.path(part, f".{at}{LENGTHS}")) for part in parts]
            documents = [np.load(work.path(part, f".{at}{DOCUMENTS}")) for part in parts]
            with tokens.open("wb") as target:
                for part, each in zip(parts, lengths):
                    _append(
                        work.path(part, f".{at}{TOKENS}"), target, int(each.sum()) * np.dtype(dtype).itemsize
                    )
                target.flush()
                os.fsync(target.fileno())
            if not sum(map(len, lengths)):
                shutil.rmtree(work.folder, ignore_errors=True)
                raise DataError(
                    "no record gives anything to train on; see --seq-length and --overlong, or name "
                    "other input"
                )
            write_index(index, np.concatenate(lengths), np.dtype(dtype), np.concatenate(documents))
            with index.open("rb") as written:
                os.fsync(written.fileno())
        # An older index must not describe new tokens, not even for a moment.
        for prefix in prefixes:
            Path(f"{prefix}.idx").unlink(missing_ok=True)
        note_source(output_prefix, made_from)
        for prefix, (tokens, _) in zip(prefixes, temporary):
            os.replace(tokens, f"{prefix}.bin")
        for prefix, (_, index) in zip(prefixes, temporary):
            os.replace(index, f"{prefix}.idx")
    finally:
        for pair in temporary:
            for path in pair:
                with suppress(OSError):
                    path.unlink()


def _append(part: Path, target: Any, size: int) -> None:
    """Copy the tokens of a part.

    Raises:
        DataError: they are not as many as its lengths say.
    """
    if part.stat().st_size != size:
        raise DataError(f"{part}: was changed since it was written; remove the folder {part.parent}")
    with part.open("rb") as source:
        shutil.copyfileobj(source, target, 1 << 20)

"""``prepare-text``: make a tokenized dataset that megatron-core reads out of text.

Documents are text files, blocks of paragraphs, or records; the tokenizer is trained on them or reused. The
work is done in parts that survive a kill; the dataset itself is written under a temporary name and its index
appears last, so that it is complete or not there. Neither torch nor megatron-core is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from mindspeed_core.errors import ArgumentError, DataError, UserError
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_train.data.files import token_counts, token_dtype, write_index
from mindspeed_train.text.end_token import note_token
from mindspeed_train.text.input import SUFFIXES, Reading, read_segment, segments_of, text_files
from mindspeed_train.text.parts import (
    PART_BYTES,
    Part,
    Work,
    file_facts,
    join_parts,
    locked,
    make_parts,
    plan_parts,
)
from mindspeed_train.text.progress import Progress
from mindspeed_train.text.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer

_ENCODING_ERRORS = ("error", "replace", "skip")
_OVERWRITE = "--overwrite"
_SOURCE, _MADE_FROM = ".source.json", "made_from"
"""Suffix of the file beside a dataset that tells what it was made of, and its key."""


@dataclass(frozen=True)
class PreparedText:
    """A dataset that was written.

    Attributes:
        prefix: path of the ``.bin`` / ``.idx`` pair without suffix.
        tokenizer: path of its tokenizer.
        documents: number of documents.
        tokens: number of tokens, end-of-document tokens included.
        text_bytes: bytes of UTF-8 text.
        vocab_size: ids of the tokenizer.
        unigram_entropy: nats per token of a model that knows token frequencies and nothing else.
        skipped: files and lines that were left out because they are not UTF-8.
        reused: parts that an earlier, interrupted run had finished.
    """

    prefix: str
    tokenizer: Path
    documents: int
    tokens: int
    text_bytes: int
    vocab_size: int
    unigram_entropy: float
    skipped: tuple[str, ...] = ()
    reused: int = 0


def unigram_entropy(source: str | Path | np.ndarray | Sequence[int]) -> float:
    """Compute the entropy of token frequencies, in nats per token.

    Args:
        source: prefix of a dataset, or how often each id occurs ``[ids]``.

    Raises:
        DataError: the dataset cannot be read.
    """
    found = token_counts(source) if isinstance(source, (str, Path)) else np.asarray(source)
    counts = found[found > 0].astype(np.float64)
    if counts.size == 0:
        return 0.0
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum()) + 0.0


def read_documents(
    files: Iterable[Path], reading: Reading, skipped: list[str] | None = None
) -> Iterator[str]:
    """Yield the documents of files in order; ``skipped`` receives what is left out, see `read_segment`.

    Raises:
        DataError: a file cannot be read, is cut off or is not UTF-8.
    """
    for file in files:
        for segment in segments_of(file, PART_BYTES):
            yield from read_segment(segment, reading, [] if skipped is None else skipped)


def prepare_text(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    *,
    vocab_size: int = 8192,
    tokenizer: str | Path | None = None,
    tokenizer_type: str | None = None,
    eod_token: str | None = None,
    append_eod: bool = True,
    split_documents: int | None = None,
    encoding_errors: str = "error",
    json_keys: Sequence[str] = ("text",),
    suffixes: Sequence[str] = SUFFIXES,
    workers: int = 1,
    part_bytes: int = PART_BYTES,
    progress: bool = False,
    overwrite: bool = False,
) -> PreparedText:
    """Tokenize text into ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.tokenizer.json`` (or ``.model``).

    The result does not depend on ``workers``. An interrupted run leaves ``PREFIX.parts``, from which the same
    call goes on.

    Args:
        inputs: text files and folders.
        output_prefix: where the dataset goes.
        vocab_size: size of a newly trained tokenizer.
        tokenizer: an existing tokenizer to use instead.
        tokenizer_type: its type, where the file does not show it, see `load_tokenizer`.
        eod_token: the end-of-document token of ``tokenizer``, where it is none of the usual ones.
        append_eod: end each document with the end-of-document token.
        split_documents: see `Reading`.
        encoding_errors: see `Reading`.
        json_keys: see `Reading`.
        suffixes: see `text_files`.
        workers: number of processes that tokenize.
        part_bytes: about how much input a process takes at a time.
        progress: draw a progress bar on stderr.
        overwrite: replace a dataset of this prefix that was made of something else.

    Raises:
        ArgumentError: a number is too small.
        DataError: nothing to read, a file that cannot be used, no place to write, or another dataset there.
    """
    if split_documents is not None and split_documents < 1:
        raise ArgumentError(
            "--split-documents", split_documents, "is not a number of characters above 0", "drop it"
        )
    if workers < 1:
        raise ArgumentError("--workers", workers, "must be at least 1", "use 1 or more")
    reading = Reading(split_documents, encoding_errors, tuple(json_keys))
    files = text_files(inputs, suffixes)
    prefix = str(output_prefix)
    vocabulary: Any = vocab_size
    if tokenizer is not None and os.path.exists(tokenizer):
        vocabulary = [str(tokenizer), *file_facts(tokenizer), tokenizer_type, eod_token]
    made_from = _digest_of(files, reading, [vocabulary, append_eod])
    if not overwrite:
        refuse_other_dataset(prefix, made_from)
    folder = Path(f"{prefix}.parts")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder), Progress(progress) as bar:
            if tokenizer is None:
                tokenizer = _trained_tokenizer(files, reading, vocab_size, folder, bar)
            source = Path(tokenizer)
            chosen = load_tokenizer(source, tokenizer_type, eod_token)
            work = Work(
                str(folder),
                str(source),
                tokenizer_type,
                json.dumps(chosen.unique_identifiers),
                reading,
                append_eod,
                token_dtype(chosen.vocab_size).name,
                eod_token,
            )
            parts = plan_parts(files, work, part_bytes)
            bar.begin("tokenizing", sum(part.size for part in parts))
            reused, skipped = make_parts(parts, work, workers, bar.advance)
            documents, text_bytes, final = _publish(prefix, parts, work, chosen, len(files), made_from)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"--output-prefix {prefix!r}: cannot be written ({error}); name a folder that can be written"
        ) from error
    counts = token_counts(prefix)
    return PreparedText(
        prefix=prefix,
        tokenizer=final,
        documents=documents,
        tokens=int(counts.sum()),
        text_bytes=text_bytes,
        vocab_size=chosen.vocab_size,
        unigram_entropy=unigram_entropy(counts),
        skipped=tuple(skipped),
        reused=reused,
    )


def _digest_of(files: Sequence[Path], reading: Reading, options: Any) -> str:
    """Return a digest of the files, their sizes and times, and how they are read and tokenized."""
    facts = [asdict(reading), options, [[str(file), *file_facts(file)] for file in files]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def refuse_other_dataset(prefix: str, made_from: str, indices: Sequence[str] = ()) -> None:
    """Raise where a dataset of this prefix was made of other text, with other options, or by something else.

    The same command again makes the same dataset again, which loses nothing.

    Args:
        prefix: of the dataset.
        made_from: a digest of what it is made of.
        indices: its ``.idx`` files; by default the one of the prefix.
    """
    there = next((path for path in indices or [f"{prefix}.idx"] if os.path.lexists(path)), None)
    if there is None:
        return
    try:
        recorded = json.loads(Path(f"{prefix}{_SOURCE}").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        recorded = None
    if not isinstance(recorded, dict) or recorded.get(_MADE_FROM) != made_from:
        raise DataError(
            f"--output-prefix {prefix!r}: {there} is there already, not made of this text with these "
            f"options; name another prefix, or replace it with {_OVERWRITE}"
        )


def note_source(prefix: str, made_from: str) -> None:
    """Write what a dataset is made of beside it, for `refuse_other_dataset`."""
    Path(f"{prefix}{_SOURCE}").write_text(json.dumps({_MADE_FROM: made_from}) + "\n")


def _trained_tokenizer(
    files: Sequence[Path], reading: Reading, vocab_size: int, folder: Path, bar: Progress
) -> Path:
    """Train on all documents, or take what an interrupted run with the same input trained."""
    target = folder / f"tokenizer-{_digest_of(files, reading, vocab_size)}.json"
    if target.is_file():
        return target
    bar.begin("training the tokenizer", sum(file.stat().st_size for file in files))

    def documents() -> Iterator[str]:
        for file in files:
            yield from read_documents([file], reading)
            bar.advance(file.stat().st_size)

    temporary = target.with_suffix(".tmp")
    train_tokenizer(documents(), vocab_size).save(temporary)
    os.replace(temporary, target)
    return target


def _publish(
    prefix: str, parts: Sequence[Part], work: Work, tokenizer: TextTokenizer, files: int, made_from: str
) -> tuple[int, int, Path]:
    """Join the parts into the dataset; return documents, bytes of text, and the tokenizer's path."""
    final = [Path(f"{prefix}{suffix}") for suffix in (f".tokenizer{tokenizer.suffix}", ".bin", ".idx")]
    temporary = [Path(f"{path}.tmp") for path in final]
    try:
        tokenizer.save(temporary[0])
        lengths, documents, text_bytes = join_parts(parts, work, temporary[1])
        if documents == 0:
            shutil.rmtree(work.folder, ignore_errors=True)
            raise DataError(f"the {files} text files contain no text; name files that do")
        write_index(temporary[2], lengths, np.dtype(work.dtype))
        # An older index must not describe new tokens, not even for a moment.
        final[2].unlink(missing_ok=True)
        note_source(prefix, made_from)
        for written, path in zip(temporary, final):
            os.replace(written, path)
        note_token(final[0], tokenizer.eod_token)
    finally:
        for written in temporary:
            with suppress(OSError):
                written.unlink()
    return documents, text_bytes, final[0]


@click.command("prepare-text")
@click.argument("inputs", nargs=-1, required=True, type=click.Path())
@click.option("--output-prefix", required=True, type=click.Path(), help="Where PREFIX.bin and PREFIX.idx go.")
@click.option("--vocab-size", default=8192, show_default=True, help="Size of a newly trained tokenizer.")
@click.option(
    "--tokenizer",
    type=click.Path(),
    help="A tokenizer.json, a SentencePiece .model, or a folder with one, instead of training.",
)
@click.option(
    "--tokenizer-type",
    type=click.Choice(
        ("HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
    ),
    help="Its type, where the file does not show it.",
)
@click.option("--eod-token", help="Its token that ends documents, where it is none of the usual ones.")
@click.option(
    "--json-keys",
    multiple=True,
    default=("text",),
    show_default=True,
    help="Where the text is in JSON lines and Parquet; repeated, each gives a document of its own.",
)
@click.option("--workers", default=1, show_default=True, help="Processes; the result is the same for any.")
@click.option(
    "--append-eod/--no-append-eod", default=True, show_default=True, help="End documents with a token."
)
@click.option(
    "--split-documents",
    type=int,
    metavar="CHARACTERS",
    help="Begin a new document at the first blank line after this many characters, instead of one per file.",
)
@click.option(
    "--encoding-errors",
    type=click.Choice(_ENCODING_ERRORS),
    default="error",
    show_default=True,
    help="What to do with text that is not UTF-8.",
)
@click.option(_OVERWRITE, is_flag=True, help="Replace a dataset of other text or options.")
@click.option("--suffix", "suffixes", multiple=True, help="What counts as text in a folder; may be repeated.")
def command(inputs: tuple[str, ...], output_prefix: str, suffixes: tuple[str, ...], **options: Any) -> None:
    """Tokenize text into a dataset for --data-path.

    INPUTS are plain text, JSON lines (.jsonl), Parquet, gzip (.gz) of the first two, and folders of them.
    When the program is interrupted, the same command goes on where it stopped.
    """
    try:
        made = prepare_text(
            inputs,
            output_prefix,
            suffixes=tuple("." + suffix.lstrip(".").lower() for suffix in suffixes) or SUFFIXES,
            progress=sys.stderr.isatty(),
            **options,
        )
    except UserError as error:
        raise click.ClickException(str(error)) from error
    for file in made.skipped:
        emit(f"left out, not UTF-8: {file}", err=True)
    if made.reused:
        emit(f"reused           {made.reused:,} parts of an interrupted run")
    emit(f"documents        {made.documents:,}")
    emit(f"tokens           {made.tokens:,}")
    emit(f"text             {made.text_bytes:,} bytes ({made.text_bytes / made.tokens:.2f} per token)")
    emit(f"vocabulary       {made.vocab_size:,}")
    emit(
        f"unigram entropy  {made.unigram_entropy:.3f} nats per token (guessing evenly: "
        f"{math.log(made.vocab_size):.3f})"
    )
    emit(f"train with       --data-path {made.prefix} --tokenizer-model {made.tokenizer}")

"""``prepare-text``: plain text files become a tokenized dataset that megatron-core reads.

Documents are files, or blocks of paragraphs; the tokenizer is trained on them or reused. Everything is
written under a temporary name first and the index appears last, so that a dataset is complete or not there.
"""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mindspeed_core.errors import ArgumentError, DataError, UserError

if TYPE_CHECKING:
    import numpy as np

    from mindspeed_core.hosts.standalone.tokenizer import BpeTokenizer

__all__ = ["PreparedText", "command", "prepare_text", "read_documents", "text_files", "unigram_entropy"]

SUFFIXES = (".txt", ".md", ".rst", ".py")
_ENCODING_ERRORS = ("error", "replace", "skip")
_BATCH = 256
_BLANK_LINES = re.compile(r"\n[ \t\r]*\n")


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
        skipped: files that were left out because they are not UTF-8.
    """

    prefix: str
    tokenizer: Path
    documents: int
    tokens: int
    text_bytes: int
    vocab_size: int
    unigram_entropy: float
    skipped: tuple[Path, ...] = ()


def unigram_entropy(source: str | Path | np.ndarray | Sequence[int]) -> float:
    """Entropy in nats per token of the frequencies of tokens.

    Args:
        source: prefix of a dataset, or how often each id occurs ``[ids]``.

    Raises:
        DataError: the dataset cannot be read.
    """
    import numpy as np

    from mindspeed_core.hosts.standalone.dataset_files import token_counts

    found = token_counts(source) if isinstance(source, (str, Path)) else np.asarray(source)
    counts = found[found > 0].astype(np.float64)
    if counts.size == 0:
        return 0.0
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum()) + 0.0


def text_files(inputs: Iterable[str | Path], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """The files to read, sorted within each folder.

    Args:
        inputs: files (taken whatever their suffix) and folders (searched, without hidden entries).
        suffixes: what counts as text in a folder.

    Raises:
        DataError: an input does not exist, or there is no file at all.
    """
    files: dict[Path, None] = {}
    for given in inputs:
        path = Path(given)
        if path.is_file():
            files[path] = None
        elif path.is_dir():
            for folder, folders, names in os.walk(path):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                for name in sorted(names):
                    if not name.startswith(".") and Path(name).suffix.lower() in suffixes:
                        files[Path(folder, name)] = None
        else:
            raise DataError(f"{path}: does not exist; name text files, or folders that contain them")
    if not files:
        raise DataError(
            f"no text file in {', '.join(str(path) for path in inputs) or 'no input'} (looked for "
            f"{', '.join(suffixes)}); name the files, or add --suffix"
        )
    return list(files)


def read_documents(
    files: Iterable[Path],
    *,
    split_documents: int | None = None,
    encoding_errors: str = "error",
    skipped: list[Path] | None = None,
) -> Iterator[str]:
    """Yield the documents of text files in order; empty ones are left out.

    Args:
        files: the files.
        split_documents: None for one document per file, else end a document at the first blank line after
            this many characters.
        encoding_errors: what to do with a file that is not UTF-8: ``error``, ``replace`` bytes, ``skip`` it.
        skipped: receives the files that were left out.

    Raises:
        DataError: a file cannot be read or is not UTF-8.
    """
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(
                f"{file}: cannot be read ({error.strerror}); leave it out or correct it"
            ) from error
        try:
            text = content.decode("utf-8", "replace" if encoding_errors == "replace" else "strict")
        except UnicodeDecodeError as error:
            if encoding_errors == "skip":
                if skipped is not None:
                    skipped.append(file)
                continue
            line = content.count(b"\n", 0, error.start) + 1
            raise DataError(
                f"{file}: is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start} (line "
                f"{line}); convert the file, or use --encoding-errors replace or --encoding-errors skip"
            ) from error
        text = text.removeprefix("\ufeff")
        for document in [text] if split_documents is None else _blocks(text, split_documents):
            if document.strip():
                yield document


def prepare_text(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    *,
    vocab_size: int = 8192,
    tokenizer: str | Path | None = None,
    append_eod: bool = True,
    split_documents: int | None = None,
    encoding_errors: str = "error",
    suffixes: Sequence[str] = SUFFIXES,
    progress: bool = False,
) -> PreparedText:
    """Tokenize text files into ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.tokenizer.json``.

    Args:
        inputs: text files and folders.
        output_prefix: where the dataset goes.
        vocab_size: size of a newly trained tokenizer.
        tokenizer: an existing ``tokenizer.json`` to use instead.
        append_eod: end each document with the end-of-document token.
        split_documents: see `read_documents`.
        encoding_errors: see `read_documents`.
        suffixes: see `text_files`.
        progress: draw a progress bar on stderr.

    Raises:
        ArgumentError: ``vocab_size`` is too small.
        DataError: nothing to read, a file that cannot be used, or no place to write.
    """
    from mindspeed_core.hosts.standalone.tokenizer import load_tokenizer, train_tokenizer

    if split_documents is not None and split_documents < 1:
        raise ArgumentError("--split-documents", split_documents, "is not a number of characters above 0")
    files = text_files(inputs, suffixes)
    prefix = str(output_prefix)
    skipped: list[Path] = []

    def documents(note: str) -> Iterator[str]:
        skipped.clear()
        tracked = _tracked(files, note) if progress else files
        return read_documents(
            tracked, split_documents=split_documents, encoding_errors=encoding_errors, skipped=skipped
        )

    if tokenizer is not None:
        chosen = load_tokenizer(tokenizer)
    else:
        chosen = train_tokenizer(documents("training the tokenizer"), vocab_size)
    temporary = [Path(f"{prefix}.{suffix}.tmp") for suffix in ("tokenizer.json", "bin", "idx")]
    try:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        chosen.save(temporary[0])
        count, text_bytes = _write(documents("tokenizing"), chosen, temporary[1], temporary[2], append_eod)
        if count == 0:
            raise DataError(f"the {len(files)} text files contain no text; name files that do")
        final = [path.with_suffix("") for path in temporary]
        # An older index must not describe new tokens, not even for a moment.
        final[2].unlink(missing_ok=True)
        for written, path in zip(temporary, final):
            os.replace(written, path)
    except OSError as error:
        raise DataError(
            f"--output-prefix {prefix!r}: cannot be written ({error}); name a folder that can be written"
        ) from error
    finally:
        for written in temporary:
            with suppress(OSError):
                written.unlink()
    from mindspeed_core.hosts.standalone.dataset_files import token_counts

    counts = token_counts(prefix)
    return PreparedText(
        prefix=prefix,
        tokenizer=final[0],
        documents=count,
        tokens=int(counts.sum()),
        text_bytes=text_bytes,
        vocab_size=chosen.vocab_size,
        unigram_entropy=unigram_entropy(counts),
        skipped=tuple(skipped),
    )


def _write(
    documents: Iterator[str], tokenizer: BpeTokenizer, bin_file: Path, idx_file: Path, append_eod: bool
) -> tuple[int, int]:
    with warnings.catch_warnings():
        # What megatron-core says about missing accelerator libraries has nothing to do with text.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(bin_file), dtype=DType.optimal_dtype(tokenizer.vocab_size))
    count = text_bytes = 0
    try:
        while batch := list(islice(documents, _BATCH)):
            for text, ids in zip(batch, tokenizer.tokenize_batch(batch)):
                if append_eod:
                    ids.append(tokenizer.eod)
                builder.add_document(ids, [len(ids)])
                count += 1
                text_bytes += len(text.encode())
        builder.finalize(str(idx_file))
    finally:
        builder.data_file.close()
    return count, text_bytes


def _blocks(text: str, size: int) -> Iterator[str]:
    start = 0
    for gap in _BLANK_LINES.finditer(text):
        if gap.start() - start >= size:
            yield text[start : gap.start()] + "\n"
            start = gap.end()
    yield text[start:]


def _tracked(files: Sequence[Path], note: str) -> Iterable[Path]:
    from rich.console import Console
    from rich.progress import track

    return track(files, description=note, console=Console(stderr=True), transient=True)


@click.command("prepare-text")
@click.argument("inputs", nargs=-1, required=True, type=click.Path())
@click.option("--output-prefix", required=True, type=click.Path(), help="Where PREFIX.bin and PREFIX.idx go.")
@click.option("--vocab-size", default=8192, show_default=True, help="Size of a newly trained tokenizer.")
@click.option("--tokenizer", type=click.Path(), help="Use this tokenizer.json instead of training one.")
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
    help="What to do with files that are not UTF-8.",
)
@click.option("--suffix", "suffixes", multiple=True, help="What counts as text in a folder; may be repeated.")
def command(
    inputs: tuple[str, ...],
    output_prefix: str,
    vocab_size: int,
    tokenizer: str | None,
    append_eod: bool,
    split_documents: int | None,
    encoding_errors: str,
    suffixes: tuple[str, ...],
) -> None:
    """Tokenize text files, and folders of them, into a dataset for --data-path."""
    try:
        made = prepare_text(
            inputs,
            output_prefix,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            append_eod=append_eod,
            split_documents=split_documents,
            encoding_errors=encoding_errors,
            suffixes=tuple("." + suffix.lstrip(".").lower() for suffix in suffixes) or SUFFIXES,
            progress=sys.stderr.isatty(),
        )
    except UserError as error:
        raise click.ClickException(str(error)) from error
    for file in made.skipped:
        click.echo(f"left out, not UTF-8: {file}", err=True)
    click.echo(f"documents        {made.documents:,}")
    click.echo(f"tokens           {made.tokens:,}")
    click.echo(f"text             {made.text_bytes:,} bytes ({made.text_bytes / made.tokens:.2f} per token)")
    click.echo(f"vocabulary       {made.vocab_size:,}")
    click.echo(
        f"unigram entropy  {made.unigram_entropy:.3f} nats per token (guessing evenly: "
        f"{math.log(made.vocab_size):.3f})"
    )
    click.echo(f"train with       --data-path {made.prefix} --tokenizer-model {made.tokenizer}")

"""Parts of a prepared dataset: records of one part of the input, tokenized into files.

A part is written by one process and has, for every field, its tokens, the lengths of its sequences and the
sequences of its documents; what was refused stands beside it with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from mindspeed_models.data.conversation import BadRecord
from mindspeed_models.data.encoding import Counts, Encoding, Sample
from mindspeed_models.data.handlers import Handler, TextHandler
from mindspeed_models.data.records import Record, read_records
from mindspeed_models.data.settings import Sentences, Settings
from mindspeed_models.data.tokenizers import TextEncoder, load_encoder
from mindspeed_train.interface import Part, finished, named_part, token_dtype

TOKENS, LENGTHS, DOCUMENTS, REJECTED, DONE = ".bin", ".lengths.npy", ".documents.npy", ".rejected", ".json"
BATCH = 1000
_SHOWN = 2000


@dataclass
class Opened:
    """The tokenizer and template that a process loads once.

    Attributes:
        encoder: the tokenizer.
        handler: says what a record becomes.
        encoding: of conversations.
        sentences: of texts.
    """

    encoder: TextEncoder
    handler: Handler
    encoding: Encoding
    sentences: Sentences


@dataclass(frozen=True)
class Preprocessing:
    """Makes the parts of a dataset.

    Attributes:
        folder: where parts are kept.
        settings: what records become.
        facts: on what the result depends, see `Settings.facts`.
        fields: the names of the fields.
        dtypes: the type of a token of each.
    """

    folder: str
    settings: Settings
    facts: Mapping[str, Any]
    fields: tuple[str, ...]
    dtypes: tuple[str, ...]

    def part(self, segments: Sequence[Any]) -> Part:
        """Return the part that is made of segments of files."""
        return named_part(self.facts, segments)

    def path(self, part: Part, suffix: str) -> Path:
        """Return the path of a file of a part."""
        return Path(self.folder, f"{part.name}{suffix}")

    def suffixes(self) -> list[str]:
        """Return the ends of the names of a part's files, the last written last."""
        each = (TOKENS, LENGTHS, DOCUMENTS)
        return [f".{field}{suffix}" for field in range(len(self.fields)) for suffix in each] + [
            REJECTED,
            DONE,
        ]

    def open(self) -> Opened:
        """Load the tokenizer and the template."""
        encoder = load_encoder(self.settings.tokenizer)
        sentences = Sentences(self.settings.split_sentences, self.settings.keep_newlines)
        return Opened(encoder, self.settings.check(), self.settings.encoding(encoder), sentences)

    def make(self, part: Part, opened: Opened) -> None:
        """Tokenize the records of files."""
        self.write(part, opened, [read_records(segment) for segment in part.segments])

    def write(self, part: Part, opened: Opened, sources: Sequence[Iterable[Record]]) -> None:
        """Tokenize records, and write the files of a part.

        Args:
            part: names the files.
            opened: of this process.
            sources: the records of each segment.
        """
        opened = replace(opened, encoding=replace(opened.encoding, counts=Counts()))
        with finished(self, part, self.suffixes()) as paths, ExitStack() as stack:
            streams = [
                stack.enter_context(paths[f".{at}{TOKENS}"].open("wb")) for at in range(len(self.fields))
            ]
            out = _Writer(streams, [np.dtype(name) for name in self.dtypes])
            rejected = stack.enter_context(paths[REJECTED].open("w", encoding="utf-8"))
            places = []
            for number, records in enumerate(sources):
                refuse = _Refused(rejected, number)
                _encode(records, opened, self.settings, out, refuse)
                places.append(refuse.last)
                out.refused += refuse.count
            for at in range(len(self.fields)):
                for suffix, values in ((LENGTHS, out.lengths[at]), (DOCUMENTS, out.documents[at])):
                    with paths[f".{at}{suffix}"].open("wb") as stream:
                        np.save(stream, np.asarray(values, dtype=np.int32))
            told = {
                "records": out.records,
                "refused": out.refused,
                "places": places,
                "counts": vars(opened.encoding.counts),
            }
            paths[DONE].write_text(json.dumps(told))


def dtypes_of(fields: int, settings: Settings, encoder: TextEncoder) -> tuple[str, ...]:
    """Return the type of a token in each field: labels hold -100, and the fields of a sample are alike."""
    text = isinstance(settings.check(), TextHandler)
    return ((token_dtype(encoder.vocab_size).name if text else "int32"),) * fields


@dataclass
class _Writer:
    """Writes sequences and remembers lengths."""

    streams: Sequence[IO[bytes]]
    dtypes: Sequence[Any]
    records: int = 0
    refused: int = 0
    lengths: list[list[int]] = field(default_factory=list)
    documents: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lengths = [[] for _ in self.streams]
        self.documents = [[] for _ in self.streams]

    def document(self, at: int, sequences: Sequence[Sequence[int]]) -> None:
        """Write the sequences of a document of a field."""
        for sequence in sequences:
            self.streams[at].write(np.asarray(sequence, dtype=self.dtypes[at]).tobytes())
            self.lengths[at].append(len(sequence))
        self.documents[at].append(len(sequences))

    def sample(self, sample: Sample) -> None:
        """Write a sample of instruction data."""
        for at, values in enumerate((sample.ids, [1] * len(sample.ids), sample.labels)):
            self.document(at, [values])


@dataclass
class _Refused:
    """Writes what is left out."""

    stream: IO[str]
    segment: int
    count: int = 0
    last: int = 0

    def __call__(self, place: int, reason: str, record: Any) -> None:
        text = record if isinstance(record, str) else json.dumps(record, ensure_ascii=False, default=str)
        told = {"segment": self.segment, "place": place, "reason": reason, "record": text[:_SHOWN]}
        self.stream.write(json.dumps(told, ensure_ascii=False) + "\n")
        self.count += 1


def _readable(records: Iterable[Record], out: _Writer, refuse: _Refused) -> Iterator[Record]:
    """Yield the records that can be read, and remember the place of the last one."""
    for record in records:
        refuse.last = record.place
        if record.value is None and not record.reason:
            continue
        out.records += 1
        if record.value is None:
            refuse(record.place, record.reason, record.source)
        else:
            yield record


def _encode(
    records: Iterable[Record], opened: Opened, settings: Settings, out: _Writer, refuse: _Refused
) -> None:
    """Write what records become."""
    if isinstance(opened.handler, TextHandler):
        _texts(records, opened, opened.handler, settings, out, refuse)
        return
    for record in _readable(records, out, refuse):
        assert record.value is not None
        try:
            # All samples of a record or none.
            encoding = replace(opened.encoding, counts=Counts())
            samples = list(_samples(record.value, opened, encoding))
        except BadRecord as error:
            refuse(record.place, str(error), record.value)
            continue
        opened.encoding.counts.add(encoding.counts)
        for sample in samples:
            out.sample(sample)


def _samples(record: Mapping[str, Any], opened: Opened, encoding: Encoding) -> Iterator[Sample]:
    handler = opened.handler
    assert not isinstance(handler, TextHandler)
    if handler.read is not None:
        for conversation in handler.read(record):
            yield from encoding.samples(conversation)
        return
    assert handler.encode is not None
    for sample in handler.encode(record, opened.encoder):
        yield from encoding.fitted(sample)


def _texts(
    records: Iterable[Record],
    opened: Opened,
    handler: TextHandler,
    settings: Settings,
    out: _Writer,
    refuse: _Refused,
) -> None:
    waiting: list[list[list[str]]] = []
    for record in _readable(records, out, refuse):
        assert record.value is not None
        try:
            texts = handler.texts(record.value, settings.json_keys)
        except BadRecord as error:
            refuse(record.place, str(error), record.value)
            continue
        waiting.append([opened.sentences.of(text) for text in texts])
        if len(waiting) == BATCH:
            _flush(waiting, opened, settings, out)
            waiting = []
    _flush(waiting, opened, settings, out)


def _flush(waiting: Sequence[list[list[str]]], opened: Opened, settings: Settings, out: _Writer) -> None:
    """Tokenize the sentences of many documents at once."""
    flat = [sentence for fields in waiting for sentences in fields for sentence in sentences]
    ids = iter(opened.encoder.texts(flat)) if flat else iter(())
    counts = opened.encoding.counts
    for fields in waiting:
        for at, sentences in enumerate(fields):
            found = [next(ids) for _ in sentences]
            if found and settings.append_eod:
                found[-1].append(opened.encoder.eod)
            if not found:
                continue
            counts.samples += 1
            counts.tokens += sum(map(len, found))
            out.document(at, found)

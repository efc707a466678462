"""SentencePiece models (``tokenizer.model``) as tokenizers for text preparation and datasets.

The library is an optional dependency: it is imported when a model is loaded, and its absence is reported with
the command that installs it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mindspeed_core.errors import DataError, NamedFileError
from mindspeed_train.named_files import read_named_file
from mindspeed_train.text.end_token import chosen_token, noted_token

_NO_PADDING = -1


class SentencePieceTokenizer:
    """A SentencePiece model, in the shape that megatron-core's datasets expect.

    Attributes:
        eod: id of the token that ends documents; ``eos`` is its other name.
        eod_token: its name, where it is not the model's end-of-sentence token.
        pad: id of the padding token, or -1 when the model has none.
        begin: id that begins every document, or None.
        unique_identifiers: what the dataset index cache depends on: the content of the file, not its place.
    """

    suffix = ".model"

    def __init__(
        self, path: str | Path, *, begin_of_document: bool = False, eod_token: str | None = None
    ) -> None:
        """Load a model.

        Args:
            path: the ``.model`` file.
            begin_of_document: begin documents with the model's begin-of-sentence token, as Llama 2 does.
            eod_token: the token that ends documents, by default the model's end-of-sentence token.

        Raises:
            DataError: the library or the file is missing, or the file is no model with an end token.
        """
        try:
            import sentencepiece
        except ImportError as error:
            raise DataError(
                f"--tokenizer-model {str(path)!r}: SentencePiece models need a library that is not "
                "installed; run pip install sentencepiece"
            ) from error
        self._content = read_named_file("--tokenizer-model", path, "name an existing model")
        try:
            self._model: Any = sentencepiece.SentencePieceProcessor(model_proto=self._content)
        except Exception as error:
            # The library raises whatever its parser met.
            reason = f"is not a SentencePiece model ({error})"
            raise NamedFileError("--tokenizer-model", str(path), reason, "copy it again") from error
        self.eod: int = self._model.eos_id()
        self.eod_token = eod_token if eod_token is not None else noted_token(Path(path))
        if self.eod_token is not None:
            self.eod = chosen_token(self.eod_token, self._id_of, str(path))
        if self.eod < 0:
            reason = "has no end-of-sentence token, which ends documents"
            remedy = "name another one with --eod-token, or train the model with one"
            raise NamedFileError("--tokenizer-model", str(path), reason, remedy)
        self.eos: int = self.eod
        self.pad: int = self._model.pad_id() if self._model.pad_id() >= 0 else _NO_PADDING
        self.begin: int | None = self._model.bos_id() if begin_of_document else None
        if self.begin is not None and self.begin < 0:
            reason = "has no begin-of-sentence token, which Llama2Tokenizer puts before documents"
            remedy = "use --tokenizer-type SentencePieceTokenizer"
            raise NamedFileError("--tokenizer-model", str(path), reason, remedy)
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict(
            [
                ("class", type(self).__name__),
                ("sha256", hashlib.sha256(self._content).hexdigest()),
                ("begin", self.begin),
            ]
        )
        if self.eod_token is not None:
            self.unique_identifiers["eod"] = self.eod

    def _id_of(self, piece: str) -> int | None:
        index = int(self._model.piece_to_id(piece))
        return index if self._model.id_to_piece(index) == piece else None

    @property
    def vocab_size(self) -> int:
        """Return the number of pieces."""
        return int(self._model.get_piece_size())

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without an end-of-document token."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts."""
        encoded: list[list[int]] = self._model.encode(list(texts), out_type=int)
        return encoded if self.begin is None else [[self.begin, *ids] for ids in encoded]

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of a sequence of ids."""
        return str(self._model.decode([int(index) for index in ids]))

    def save(self, path: str | Path) -> None:
        """Write the model file."""
        Path(path).write_bytes(self._content)

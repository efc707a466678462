"""The token that ends a document: chosen by a flag, or named in a file beside the tokenizer.

Saved models come with ``tokenizer_config.json`` and ``generation_config.json``, which name the end token of
vocabularies that spell it in their own way. Only these two values are read of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_core.errors import NamedFileError
from mindspeed_train.named_files import read_named_file

FLAG = "--eod-token"
GENERATION = "generation_config.json"
_OF_SAVED_MODELS = "tokenizer_config.json"
_OWN = "eod_token"
"""Our key in the file beside a prepared tokenizer; it wins over the usual names, other than ``eos_token``."""


def config_beside(tokenizer: Path) -> Path:
    """Return the file that describes a tokenizer: ``tokenizer_config.json`` for ``tokenizer.json``."""
    return tokenizer.with_name(f"{tokenizer.stem}_config.json")


def note_token(tokenizer: Path, token: str | None) -> None:
    """Write the end token of a prepared tokenizer beside it, so that training finds it.

    None takes back what was written for an earlier one.
    """
    beside = config_beside(tokenizer)
    if token is not None:
        beside.write_text(json.dumps({_OWN: token}, ensure_ascii=False) + "\n", encoding="utf-8")
    elif noted_token(tokenizer) is not None:
        beside.unlink()


def noted_token(tokenizer: Path) -> str | None:
    """Return what `note_token` wrote beside a tokenizer, if anything."""
    beside = config_beside(tokenizer)
    # That of a saved model is not ours.
    token = None if beside.name == _OF_SAVED_MODELS else _read(beside).get(_OWN)
    return token if isinstance(token, str) else None


def chosen_token(token: str, id_of: Callable[[str], int | None], source: str) -> int:
    """Return the id of the token that ``--eod-token`` names.

    Args:
        token: its spelling.
        id_of: the id of a token in the vocabulary, or None.
        source: the tokenizer.

    Raises:
        NamedFileError: the vocabulary has no such token.
    """
    found = id_of(token)
    if found is None:
        reason = f"is no token of {source}"
        raise NamedFileError(FLAG, token, reason, "name a token of its vocabulary, as it is spelled there")
    return found


def token_named_beside(
    tokenizer: Path, id_of: Callable[[str], int | None], token_of: Callable[[int], str | None]
) -> str | None:
    """Return the end token that the files beside a tokenizer name; None where they name none it has.

    Args:
        tokenizer: its ``tokenizer.json``.
        id_of: the id of a token in the vocabulary, or None.
        token_of: the token with an id, or None.

    Raises:
        NamedFileError: one of the files is no JSON object.
    """
    token = _read(config_beside(tokenizer)).get("eos_token")
    # Saved by older programs with its options: {"content": "</end>", "lstrip": false, ...}.
    token = token.get("content") if isinstance(token, Mapping) else token
    if isinstance(token, str) and id_of(token) is not None:
        return token
    ids = _read(tokenizer.with_name(GENERATION)).get("eos_token_id")
    first = ids[0] if isinstance(ids, list) and ids else ids
    return token_of(first) if type(first) is int and first >= 0 else None


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    content = read_named_file("--tokenizer-model", path, "make it readable, or remove it")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        remedy = f"copy it again, or name the end token with {FLAG}"
        raise NamedFileError("--tokenizer-model", str(path), f"is no JSON ({error})", remedy) from error
    return found if isinstance(found, dict) else {}

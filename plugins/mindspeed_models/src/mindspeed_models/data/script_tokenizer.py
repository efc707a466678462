"""Ids of a vocabulary without text: what instruction data asks of a tokenizer that somebody else built."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from mindspeed_core.errors import DataError

_NONE = -1


@dataclass(frozen=True)
class IdTokenizer:
    """Ids of a vocabulary.

    Attributes:
        vocab_size: number of ids.
        eod: the id that ends documents; -1 for none.
        pad: the id that fills up; -1 for none.
        unique_identifiers: what an index of samples depends on.
    """

    vocab_size: int
    eod: int = _NONE
    pad: int = _NONE
    unique_identifiers: OrderedDict[str, Any] = field(default_factory=OrderedDict)

    @property
    def eos(self) -> int:
        """Return the id that ends documents."""
        return self.eod


def script_tokenizer() -> IdTokenizer:
    """Return the ids of the tokenizer that a script of Megatron-LM has built.

    Raises:
        DataError: it does not say how many ids it has.
    """
    from mindspeed_megatron import script_tokenizer as script

    found = script.script_tokenizer()
    size = _number(found, "vocab_size")
    if size < 1:
        raise DataError(
            f"--is-instruction-dataset: the tokenizer of the script ({type(found).__name__}) does not say "
            "how many ids it has; name another --tokenizer-type, for instance HuggingFaceTokenizer"
        )
    names = OrderedDict(class_name=type(found).__name__, vocab_size=size)
    return IdTokenizer(size, _number(found, "eod"), _number(found, "pad"), names)


def _number(tokenizer: Any, name: str) -> int:
    """Return a number of a tokenizer; some raise where they have none."""
    try:
        value = getattr(tokenizer, name)
    except Exception:
        return _NONE
    return value if isinstance(value, int) else _NONE

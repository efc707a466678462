"""The tokenizer of a script of Megatron-LM, for packages that build datasets inside of it.

Imported lazily: the module of Megatron-LM exists only in its own scripts.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def script_tokenizer() -> Any:
    """Return what Megatron-LM made its tokens with; None where it has no such function.

    It is there on every rank, while datasets are built on some.

    Returns:
        The tokenizer with Megatron-LM's methods (``tokenize``, ``detokenize``, ``vocab_size``, ``eod``).

    Raises:
        ModuleNotFoundError: no checkout of Megatron-LM is importable.
        AssertionError: ``pretrain`` has not built it yet.
    """
    find = getattr(import_module("megatron.training.global_vars"), "get_tokenizer", None)
    return find() if find is not None else None

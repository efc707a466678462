"""The Megatron-LM checkout: whether it can be imported, and what it needs that is not installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

PACKAGES = {
    "six": "six",
    "regex": "regex",
    "pybind11": "pybind11",
    "sentencepiece": "sentencepiece",
    "tiktoken": "tiktoken",
    "transformers": "transformers",
    "triton": "triton",
    "einops": "einops",
}
"""Packages that the checkout imports or builds with, and the distribution that brings each."""

VARIABLE = "MEGATRON_LM_PATH"


def require() -> None:
    """Import Megatron-LM's training package.

    Raises:
        ImportError: it is not importable; the message is one sentence with the way out.
    """
    try:
        import_module("megatron.training")
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if error.name in ("megatron", "megatron.training"):
            raise ImportError(
                "mindspeed_core.megatron_adaptor: no Megatron-LM checkout is importable; add it to "
                "PYTHONPATH (megatron-core from PyPI has no megatron.training), or use mindspeed-train",
                name=error.name,
            ) from None
        brings = PACKAGES.get(name, name)
        raise ImportError(
            f"mindspeed_core.megatron_adaptor: Megatron-LM imports {name!r}, which is not installed: pip "
            f"install {brings} (mindspeed-features doctor --host megatron-lm names everything it needs)",
            name=error.name,
        ) from error


def find_checkout(paths: Iterable[str] = ()) -> Path | None:
    """The checkout that scripts would import: on the module path, or named by ``MEGATRON_LM_PATH``.

    Args:
        paths: module path; this process's by default.
    """
    named = os.environ.get(VARIABLE, "")
    for path in (*(paths or sys.path), *([named] if named else [])):
        candidate = Path(path or ".")
        if (candidate / "megatron" / "training" / "arguments.py").is_file():
            return candidate
    return None


def missing_packages() -> list[str]:
    """Distributions that the checkout needs and that are not installed."""
    return [brings for name, brings in PACKAGES.items() if find_spec(name) is None]

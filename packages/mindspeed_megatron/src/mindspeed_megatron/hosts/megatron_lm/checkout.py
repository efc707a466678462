"""The Megatron-LM checkout: whether it can be imported, and what it needs that is not installed.

Since 0.17 megatron-core from PyPI brings ``megatron.training`` too, without the scripts.
"""

from __future__ import annotations

import ast
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from mindspeed_core.discovery.installed import installed_version, package_places
from mindspeed_megatron.brought_training import is_brought
from mindspeed_megatron.dataset_helpers import (
    SOURCE,
    build_command,
    compiled_names,
    is_compiled,
    name_of_make,
    wanted_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mindspeed_core.discovery.host import Finding

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
OLDEST = "0.15.3"
"""Of the megatron-core that a checkout brings."""
SETTINGS = "cfg_container"
"""The argument of ``pretrain`` that scripts fill from arguments which they have read before."""


def require() -> None:
    """Import Megatron-LM's training package.

    Raises:
        ImportError: it is not importable; the message is one sentence with the way out.
    """
    mixed = mixture()
    if mixed:
        raise ImportError(f"mindspeed_core.megatron_adaptor: {mixed}")
    try:
        import_module("megatron.training")
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if error.name in ("megatron", "megatron.training"):
            raise ImportError(
                "mindspeed_core.megatron_adaptor: no Megatron-LM checkout is importable; add it to "
                "PYTHONPATH (megatron-core has megatron.training since 0.17), or use mindspeed-train",
                name=error.name,
            ) from None
        brings = PACKAGES.get(name, name)
        raise ImportError(
            f"mindspeed_core.megatron_adaptor: Megatron-LM imports {name!r}, which is not installed: pip "
            f"install {brings} (mindspeed-features doctor --host megatron-lm names everything it needs)",
            name=error.name,
        ) from error
    found = installed_version("megatron-core")
    if found and Version(found) < Version(OLDEST):
        raise ImportError(
            f"mindspeed_core.megatron_adaptor: this checkout brings megatron-core {found}; check out "
            f"core_v{OLDEST} or newer"
        )


def takes_settings(pretrain: object) -> bool:
    """Return whether a ``pretrain`` is that of core_v0.18 and later, which is called with a configuration.

    Their scripts read and validate the arguments themselves, before they call it.
    """
    return callable(pretrain) and SETTINGS in signature(pretrain).parameters


def find_checkout() -> Path | None:
    """Return the folder whose ``megatron.training`` scripts would import.

    It is on the module path, or named by ``MEGATRON_LM_PATH``, which comes before what megatron-core brings.
    """
    named = os.environ.get(VARIABLE, "")
    places = [Path(path or ".") for path in (*sys.path, *([named] if named else []))]
    found = [place for place in places if (place / "megatron" / "training" / "arguments.py").is_file()]
    if found and named and is_brought(found[0] / "megatron" / "training"):
        return found[-1]
    return found[0] if found else None


def mixture() -> str:
    """Say that ``megatron.training`` and ``megatron.core`` are of different versions; empty where they fit.

    Both lie in one namespace: where the checkout comes after the installed packages on the module path, its
    scripts run with the installed megatron-core.
    """
    places = package_places("megatron")
    training = next((place for place in places if (place / "training" / "__init__.py").is_file()), None)
    core = next((place for place in places if (place / "core" / "__init__.py").is_file()), None)
    if training is None or core is None or training == core:
        return ""
    expected, found = (stated_version(place / "core" / "package_info.py") for place in (training, core))
    if not expected or not found or expected == found:
        return ""
    return (
        f"megatron.training is of the checkout {training.parent} (megatron-core {expected}), and "
        f"megatron.core of {core.parent} ({found}); put the checkout first on PYTHONPATH"
    )


def stated_version(file: Path) -> str:
    """Return the version that a ``package_info.py`` of megatron-core states; empty where it states none."""
    if not file.is_file():
        return ""
    stated = {
        target.id: node.value.value
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    numbers = [stated.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    if None in numbers:
        return ""
    return ".".join(map(str, numbers)) + str(stated.get("PRE_RELEASE") or "")


def missing_packages() -> list[str]:
    """Return the distributions that the checkout needs and that are not installed."""
    return [brings for name, brings in PACKAGES.items() if find_spec(name) is None]


def findings() -> list[Finding]:
    """Look for what a training with the adaptor needs beside the core: a checkout, and what it imports."""
    from mindspeed_core.discovery.host import ERROR, NOTE, OK, Finding

    found = []
    checkout = find_checkout()
    if checkout is None:
        remedy = f"add a checkout to PYTHONPATH, or name it in {VARIABLE} for the tests"
        found.append(Finding(ERROR, "Megatron-LM", "no checkout is on the module path", remedy))
    elif str(checkout) == os.environ.get(VARIABLE, ""):
        remedy = f"PYTHONPATH={checkout} where the scripts do not lie in the checkout"
        found.append(Finding(NOTE, "Megatron-LM", f"{VARIABLE} names {checkout}", remedy))
    elif is_brought(checkout / "megatron" / "training"):
        version = installed_version("megatron-core")
        found.append(Finding(OK, "Megatron-LM", f"megatron-core {version} brings megatron.training"))
    else:
        found.append(Finding(OK, "Megatron-LM", f"{checkout} is on the module path"))
    mixed = mixture()
    if mixed:
        found.append(Finding(ERROR, "Megatron-LM", mixed, f"export PYTHONPATH={checkout}:$PYTHONPATH"))
    missing = missing_packages()
    if missing:
        remedy = f"pip install {' '.join(missing)}"
        found.append(Finding(ERROR, "Megatron-LM's imports", f"not installed: {', '.join(missing)}", remedy))
    else:
        found.append(Finding(OK, "Megatron-LM's imports", "all are installed"))
    if checkout is not None:
        found += _helpers(checkout / "megatron" / "core" / "datasets")
    return found


def _helpers(folder: Path) -> Iterator[Finding]:
    """Look for the compiled index builder: scripts run ``make``, which may build it for another Python."""
    from mindspeed_core.discovery.host import ERROR, NOTE, OK, Finding

    if not (folder / SOURCE).is_file():
        return
    subject = "Megatron-LM's helpers"
    if is_compiled(folder):
        yield Finding(OK, subject, "the compiled index builder is one of this Python")
        return
    compiled = compiled_names(folder)
    lies = (
        f"{', '.join(compiled)} belongs to another Python"
        if compiled
        else "the index builder is not compiled"
    )
    made = name_of_make()
    if made == wanted_name():
        found = f"{lies}; a script compiles {made} when it starts"
        yield Finding(NOTE, subject, found, build_command(folder))
        return
    found = (
        f"{lies}: this one loads {wanted_name()}, and the make that scripts start writes {made}, after the "
        f"first python3-config on the PATH; datasets need it"
    )
    yield Finding(ERROR, subject, found, build_command(folder))

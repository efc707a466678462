"""A changed source in the place of a file's, for this process and those that it starts.

The file itself is not touched. Environment variables tell processes that are started later, ranks of a world
for instance: a folder with a ``sitecustomize`` that imports this module stands first on their path.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path
from types import CodeType, ModuleType

from mindspeed_testing.lagging.planting import function_of, functions_of

VARIABLE = "MINDSPEED_PLANTED_SOURCE"
"""Holds the file and the one with its changed source."""
_SITE = "from mindspeed_testing.planted_source import plant\n\nplant()\n"


def plant_everywhere(path: Path, text: Path) -> None:
    """Plant a changed source here and in every process that is started from here.

    Args:
        path: the file.
        text: a file with the changed source, in a folder of its own.
    """
    (text.parent / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    os.environ[VARIABLE] = os.pathsep.join((os.path.realpath(path), str(text)))
    paths = (str(text.parent), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    plant()


def plant() -> None:
    """Compile the changed source instead of the file's in this process; functions that are there change."""
    path, text = os.environ[VARIABLE].split(os.pathsep)

    def compiled() -> CodeType:
        return compile(Path(text).read_text(encoding="utf-8"), path, "exec", dont_inherit=True)

    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> object:
        if os.path.realpath(loader.path) != path:
            return original(loader, name)
        return compiled()

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]
    for module in list(sys.modules.values()):
        if os.path.realpath(getattr(module, "__file__", None) or "") == path:
            _change_functions(module, compiled())


def _change_functions(module: ModuleType, code: CodeType) -> None:
    """Give functions of a module that is there already their changed code."""
    for names, changed in functions_of(code).items():
        function = function_of(module, names)
        if function is not None and len(function.__code__.co_freevars) == len(changed.co_freevars):
            function.__code__ = changed

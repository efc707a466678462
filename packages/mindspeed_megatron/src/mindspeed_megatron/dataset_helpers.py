"""megatron-core's compiled index builder: which file this Python loads, and the command that builds it.

The file's name carries the Python it was compiled for, and datasets cannot be built without it. Nothing here
imports megatron-core.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

SOURCE = "helpers.cpp"
_MODULE = "helpers_cpp"


def installed_folder() -> Path | None:
    """Return the folder of megatron-core's datasets on the module path."""
    spec = find_spec("megatron")
    places = spec.submodule_search_locations if spec is not None else None
    folders = (Path(place) / "core" / "datasets" for place in places or ())
    return next((folder for folder in folders if (folder / SOURCE).is_file()), None)


def wanted_name() -> str:
    """Return the name of the file that a build for this Python writes."""
    return f"{_MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"


def compiled_names(folder: Path) -> list[str]:
    """Return the compiled files of a folder, of whichever Python."""
    return sorted(path.name for path in folder.glob(f"{_MODULE}.*"))


def is_compiled(folder: Path) -> bool:
    """Return whether a folder has a file that this Python loads."""
    return any((folder / f"{_MODULE}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)


def name_of_make() -> str:
    """Return the name that Megatron-LM's own ``make`` gives: for the first ``python3-config`` on the path."""
    program = shutil.which("python3-config")
    if program is None:
        return _MODULE
    done = subprocess.run(
        [program, "--extension-suffix"], capture_output=True, text=True, timeout=60, check=False
    )
    return f"{_MODULE}{done.stdout.strip()}"


def build_command(folder: Path) -> str:
    """Return the shell command that compiles a folder's index builder for this Python."""
    python = shlex.quote(sys.executable)
    install = "" if find_spec("pybind11") else f"{python} -m pip install pybind11 && "
    source, target = (shlex.quote(str(folder.resolve() / name)) for name in (SOURCE, wanted_name()))
    return (
        f"{install}c++ -O3 -shared -std=c++17 -fPIC $({python} -m pybind11 --includes) {source} -o {target}"
    )

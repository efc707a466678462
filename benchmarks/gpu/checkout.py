"""An environment in which the checkout counts as installed, made without a network.

Entry points are read from the metadata of distributions. A folder of it, made from every ``pyproject.toml``,
stands first on ``PYTHONPATH``, so that what runs is this checkout whatever else is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def projects() -> list[Path]:
    """Return the folders of the core and of every plugin."""
    return [
        ROOT,
        *sorted(
            path.parent
            for path in (*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml"))
        ),
    ]


def write_metadata(project: Path, folder: Path) -> Path:
    """Write the ``dist-info`` of a project: name, version, requirements and entry points.

    Returns:
        The folder of its import packages.
    """
    declared = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    about = declared["project"]
    source = project / declared["tool"]["hatch"]["version"]["path"]
    found = re.search(r"^__version__ = \"([^\"]+)\"", source.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f'{source}: no line __version__ = "…"')
    info = folder / f"{about['name'].replace('-', '_')}-{found[1]}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {about['name']}", f"Version: {found[1]}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in about.get("dependencies", ())]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(_entry_points(about), encoding="utf-8")
    return source.parent.parent


def _entry_points(about: Mapping[str, Any]) -> str:
    groups = {"console_scripts": about.get("scripts", {}), **about.get("entry-points", {})}
    blocks = (
        "\n".join((f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())))
        for group, entries in groups.items()
    )
    return "\n\n".join(blocks) + "\n"


def install_wheels(wheels: Path, folder: Path) -> None:
    """Unpack every wheel of a folder with pip, without a network and without their dependencies.

    Raises:
        SystemExit: there is none, or pip fails; its message is on standard error.
    """
    found = sorted(str(path) for path in wheels.glob("*.whl"))
    if not found:
        raise SystemExit(f"--wheels {wheels}: no *.whl there")
    options = ("--no-index", "--no-deps", "--quiet", "--disable-pip-version-check", "--target", str(folder))
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, *found])
    if done.returncode:
        raise SystemExit(f"--wheels {wheels}: pip failed with status {done.returncode}")


def environment(folder: Path, wheels: Path | None, *, smoke: bool) -> dict[str, str]:
    """Return the environment of the sections.

    Args:
        folder: an empty folder that outlives them.
        wheels: a folder of wheels that are put before what is installed; None for none.
        smoke: hide every GPU.
    """
    metadata, unpacked = folder / "metadata", folder / "wheels"
    metadata.mkdir()
    paths = [metadata, *(write_metadata(project, metadata) for project in projects()), BENCHMARKS]
    if wheels is not None:
        install_wheels(wheels, unpacked)
        paths.append(unpacked)
    before = os.environ.get("PYTHONPATH")
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([before] if before else [])]),
        # Worlds fork their ranks; counting devices through the driver would spoil CUDA for the children.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    # Every rank is on this machine, which may have no network and no name that resolves.
    variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    variables.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if smoke:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return variables

"""One world and one assembled plugin for all tests of the documentation: each costs seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from markdown_files import ROOT, blocks, read

# What makes the pages lies beside them.
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "docs" / "site")]

Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def program() -> Program:
    """Run a Python module as a user would; the result must be looked at by the caller."""

    def call(module: str, *arguments: str, path: Path | None = None, cwd: Path = ROOT):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if path is not None:
            environment["PYTHONPATH"] = str(path)
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return call


@pytest.fixture(scope="session")
def guide_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package that docs/plugin-recipes.md builds, put together from its blocks and made importable."""
    try:
        import tomllib
    except ImportError:
        import tomli as tomllib

    text, folder = read("docs/plugin-recipes.md"), tmp_path_factory.mktemp("guide")
    (folder / "src" / "acme_tools").mkdir(parents=True)
    (folder / "src" / "acme_tools" / "__init__.py").touch()
    (folder / "tests").mkdir()
    for block in blocks(text, "python"):
        first, _, body = block.text.partition("\n")
        assert first.startswith("# "), f"a block does not name its file: {first}"
        with (folder / first.removeprefix("# ")).open("a", encoding="utf-8") as file:
            file.write(body + "\n\n")
    (project,) = (tomllib.loads(block.text)["project"] for block in blocks(text, "toml"))
    info = folder / "src" / f"acme_tools-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder

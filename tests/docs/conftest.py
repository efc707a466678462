"""One world and one assembled plugin for all tests of the documentation: each costs seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from built_pages import BUILT, Addresses
from markdown_files import ROOT, blocks, read

# What makes the pages lies beside them.
sys.path[:0] = [str(ROOT / "docs" / folder) for folder in ("", "site", "figures")]

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


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages. MkDocs ends with 1 for a page outside the navigation or a link that leads nowhere."""
    if BUILT in os.environ:
        return ROOT / os.environ[BUILT]
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, f"{built.stdout}{built.stderr}\n(pages are listed under nav in mkdocs.yml)"
    return folder


@pytest.fixture(scope="session")
def pages(site) -> dict[str, Addresses]:
    """Every page by its path in the site."""
    found = {path.relative_to(site).as_posix(): Addresses(path) for path in sorted(site.rglob("*.html"))}
    # It is shown under any address, so its links begin at the site's root.
    del found["404.html"]
    return found


@pytest.fixture(scope="session")
def index(site) -> dict:
    """The search index as a page from the file system reads it: a script, not a request."""
    script = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    return json.loads(script.removeprefix("var __index = "))

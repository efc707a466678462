"""Packages that are installed for one test: a directory on the path with metadata, no pip and no network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from made_packages import write_metadata

from mindspeed_core.cli.features import program


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch):
    """Make a directory of packages and metadata importable; its modules are forgotten afterwards."""
    added: list[str] = []

    def add(site: Path) -> Path:
        monkeypatch.syspath_prepend(str(site))
        added.append(str(site))
        return site

    yield add
    for name, module in list(sys.modules.items()):
        if any(str(getattr(module, "__file__", None) or "").startswith(site) for site in added):
            del sys.modules[name]


@pytest.fixture
def install(tmp_path: Path, on_path) -> Callable[..., Path]:
    """``install("dist-name", source)``: a distribution whose package has ``features.py`` with that source."""

    def make(dist: str, source: str, version: str = "0.1.0", **entry_points: str) -> Path:
        package = dist.replace("-", "_")
        site = tmp_path / f"site-{dist}"
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").write_text("")
        (site / package / "features.py").write_text(source)
        points = {f"mindspeed.features {package}": f"{package}.features:DECLARATIONS", **entry_points}
        write_metadata(site, dist, points, version)
        return on_path(site)

    return make


@pytest.fixture
def features() -> Callable[..., Result]:
    """Run ``mindspeed-features`` in this process."""

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(program, list(arguments), catch_exceptions=True)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run

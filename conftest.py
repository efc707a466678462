"""Report the time of a run by package, at its end and in build/test-times.md."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent
TABLE = ROOT / "build" / "test-times.md"
LEFT_OUT = ROOT / "tests" / "thorough.txt"
FAMILY_SECONDS = 120.0
"""The time of one family of plugins; what is longer is marked ``thorough``."""


@dataclass
class Spent:
    """Tests of one package and their seconds."""

    tests: int = 0
    setup: float = 0.0
    call: float = 0.0
    teardown: float = 0.0

    @property
    def total(self) -> float:
        """All phases together."""
        return self.setup + self.call + self.teardown


def package_of(test: str) -> str:
    """Return the package of a test's id: a folder of tests/, or the folder of a plugin."""
    parts = test.partition("::")[0].split("/")
    if "tests" not in parts[1:]:
        return "/".join(parts[:2])
    return "/".join(parts[: parts.index("tests", 1)])


def is_family(package: str) -> bool:
    """Return whether a package has the budget of a family: those of plugins do."""
    return package.startswith("plugins/")


class TestTimes:
    """Adds up the durations that pytest reports."""

    __test__ = False

    def __init__(self) -> None:
        self.packages: dict[str, Spent] = defaultdict(Spent)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of one test; a worker that crashed reports no phase."""
        if report.when not in ("setup", "call", "teardown"):
            return
        spent = self.packages[package_of(report.nodeid)]
        spent.tests += report.when == "call"
        setattr(spent, report.when, getattr(spent, report.when) + report.duration)

    def table(self) -> list[str]:
        """Return the table in Markdown, the longest package first."""
        rows = sorted(self.packages.items(), key=lambda item: -item[1].total)
        whole = Spent(*(sum(getattr(s, f) for _, s in rows) for f in ("tests", "setup", "call", "teardown")))
        lines = [
            f"| {'package':<38} | tests | set-up s | tests s | total s | share |",
            f"|{'-' * 40}|------:|---------:|--------:|--------:|------:|",
        ]
        for name, spent in [*rows, ("all", whole)]:
            share = spent.total / whole.total if whole.total else 0.0
            lines.append(
                f"| {name:<38} | {spent.tests:5d} | {spent.setup:8.1f} | {spent.call + spent.teardown:7.1f} "
                f"| {spent.total:7.1f} | {share:5.0%} |"
            )
        return lines

    def too_long(self) -> list[str]:
        """Return a warning for each family above its budget."""
        return [
            f"{name} took {spent.total:.0f} s of the {FAMILY_SECONDS:.0f} s of a family: share worlds, "
            "or mark the longest tests thorough"
            for name, spent in sorted(self.packages.items())
            if is_family(name) and spent.total > FAMILY_SECONDS
        ]

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Print the table, keep it in a file, and warn of a family that is too long."""
        if not self.packages:
            return
        lines = self.table()
        terminalreporter.section("time by package")
        for line in lines:
            terminalreporter.write_line(line)
        # Trainings on stand-ins for an NPU are a run of their own, without a budget.
        of_suite = not config.pluginmanager.hasplugin("mindspeed_testing.npu.plugin")
        if of_suite and "thorough" not in (config.option.markexpr or "").replace("not thorough", ""):
            for warning in self.too_long():
                terminalreporter.write_line(f"WARNING: {warning}", yellow=True)
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def asked_for(request: pytest.FixtureRequest) -> Callable[[str], set[Any]]:
    """``asked_for("case")``: values of a parameter for which tests of this module run."""

    def values(name: str) -> set[Any]:
        here = [item for item in request.session.items if item.path == request.path]
        given = [item.callspec.params for item in here if hasattr(item, "callspec")]
        return {params[name] for params in given if name in params}

    return values


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_a_launcher_is_left() -> Iterator[None]:
    """Name the module that leaves a process group or a variable of a launcher to the tests behind it."""

    def left() -> dict[str, Any]:
        found: dict[str, Any] = {name: os.environ[name] for name in OF_LAUNCHERS if name in os.environ}
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            found["process group"] = distributed.get_backend()
        return found

    before = left()
    yield
    assert left() == before


OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher says of a rank."""
WORLD_IMPORTS = (
    "mindspeed_kernels.modules.activation",
    "mindspeed_kernels.modules.grouped_experts",
    "mindspeed_kernels.modules.norm",
    "mindspeed_moe.placement",
)
"""Modules of plugins that take long to import, and are safe to fork after: worlds begin with them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what ``tests/thorough.txt`` names, before tests are chosen by their marks."""
    named = {line for line in LEFT_OUT.read_text(encoding="utf-8").splitlines() if not line.startswith("#")}
    for item in items:
        if item.nodeid in named or item.nodeid.partition("::")[0] in named:
            item.add_marker(pytest.mark.thorough)


def pytest_configure(config: pytest.Config) -> None:
    """Measure, unless a test started this run."""
    # What stands in for an NPU starts a runtime when it is imported.
    if not config.pluginmanager.hasplugin("mindspeed_testing.npu.plugin"):
        os.environ.setdefault("MINDSPEED_WORLD_IMPORTS", ",".join(WORLD_IMPORTS))
    # Of a training of two steps drawing its curves is two thirds of the time.
    os.environ.setdefault("MINDSPEED_CURVES", "0")
    if "PYTEST_CURRENT_TEST" not in os.environ:
        config.pluginmanager.register(TestTimes(), "test-times")

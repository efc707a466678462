"""A pytest plugin that records the functions each test enters: ``-p mindspeed_testing.npu.touched``.

Planted faults are looked for by the tests that enter the changed function, the shortest first. Only this
process is watched; what ranks of a world run is not.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from mindspeed_testing.lagging.planting import function_of, functions_of
from mindspeed_testing.npu.reached import RewritingFinder

_NAME = "__entered_function__"

_RECORD = pytest.StashKey["Touched"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Return the options of the record."""
    group = parser.getgroup("touched", "Functions that tests enter")
    group.addoption("--touched", type=Path, required=False, help="Where the record goes, as JSON.")
    group.addoption(
        "--touched-below", action="append", default=[], type=Path, help="Folders whose functions count."
    )


class Below:
    """The Python files below folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Take folders, whatever links lead there."""
        self._folders = tuple(os.path.realpath(folder) + os.sep for folder in folders)

    def __contains__(self, path: object) -> bool:
        """Return whether a path is below one of the folders."""
        return str(path).startswith(self._folders)


class Touched:
    """Functions by test, with the seconds that each test took.

    Attributes:
        files: whose functions count.
        tests: ``{test: {"seconds": …, "functions": [[file, first line], …]}}``, of tests that passed.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        """Record functions of the Python files below folders."""
        self.files = Below(folders)
        self._entered: set[tuple[str, int]] = set()
        self._finder = RewritingFinder(self)
        self.tests: dict[str, dict[str, Any]] = {}

    def start(self) -> None:
        """Watch modules that are imported from now on, and functions of those that are there."""
        sys.meta_path.insert(0, self._finder)
        for module in list(sys.modules.values()):
            path = os.path.realpath(getattr(module, "__file__", None) or "")
            if path in self.files:
                self._watch_loaded(module, path)

    def stop(self) -> None:
        """Leave modules that are imported from now on alone."""
        sys.meta_path.remove(self._finder)

    def run(self, module: ModuleType, path: str) -> None:
        """Execute a module that is imported, every function of which notes that it is entered."""
        vars(module)[_NAME] = functools.partial(self._enter, path)
        exec(_noting(path), vars(module))  # noqa: S102 - the module's own source

    def _watch_loaded(self, module: ModuleType, path: str) -> None:
        vars(module)[_NAME] = functools.partial(self._enter, path)
        for names, code in functions_of(_noting(path)).items():
            function = function_of(module, names)
            if function is not None and len(function.__code__.co_freevars) == len(code.co_freevars):
                function.__code__ = code

    def _enter(self, path: str, line: int) -> None:
        self._entered.add((path, line))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record one test, fixtures included; those of a module count for the first of its tests."""
        self._entered.clear()
        started = time.perf_counter()
        result = yield
        found = self.tests.setdefault(item.nodeid, {"failed": False})
        found["seconds"] = round(time.perf_counter() - started, 3)
        found["functions"] = sorted(self._entered)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that does not pass without a fault."""
        if report.failed or report.skipped:
            self.tests[report.nodeid] = {"failed": True}

    def written(self) -> Mapping[str, Any]:
        """Return what passed."""
        return {
            name: {key: found[key] for key in ("seconds", "functions")}
            for name, found in self.tests.items()
            if not found["failed"]
        }


def _noting(path: str) -> CodeType:
    """Return the code of a file whose functions begin with a note."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            note = ast.Expr(ast.Call(ast.Name(_NAME, ast.Load()), [ast.Constant(first)], []))
            place = 1 if ast.get_docstring(node, clean=False) is not None else 0
            node.body.insert(place, ast.copy_location(note, node.body[0]))
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch."""
    if config.getoption("touched") is not None:
        config.stash[_RECORD] = Touched(config.getoption("touched_below"))
        config.pluginmanager.register(config.stash[_RECORD])
        config.stash[_RECORD].start()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the record."""
    record = session.config.stash.get(_RECORD, None)
    if record is not None:
        record.stop()
        text = json.dumps(record.written(), indent=0)
        session.config.getoption("touched").write_text(text, encoding="utf-8")

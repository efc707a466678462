"""Print the test files that a change can touch: ``python tools/affected_tests.py [BASE]``.

A test file is chosen when it changed itself, or when a changed module is among what it imports, directly or
through modules of this repository. Names in text count as imports (``"mindspeed_megatron.layers"``,
``"module:attribute"``), so that stages, worlds and targets of patches are followed; so do names of hosts.
Features are not followed from their flags: a plugin's change runs the tests that import the plugin.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
EVERYTHING = ("pyproject.toml", "noxfile.py", "constraints.txt", "conftest.py")
"""Files of the root whose change can touch every test."""
HOSTS = {
    "standalone": "mindspeed_train",
    "library": "mindspeed_megatron.hosts.library",
    "megatron-lm": "mindspeed_megatron.hosts.megatron_lm",
}
"""Entry points that are named by a word, and their packages."""
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:[.:][A-Za-z_]\w*)+")


class Imports:
    """Imports among the files of a repository; paths are relative, with slashes.

    Args:
        sources: text of every Python file by path.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._files: dict[str, list[str]] = {}
        for path in sources:
            self._files.setdefault(module_name(path), []).append(path)
        trees = {path: ast.parse(text) for path, text in sources.items()}
        self._exports = {
            f"{module_name(path)}.{alias.asname or alias.name}": f"{node.module}.{alias.name}"
            for path, tree in trees.items()
            if is_package(path)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        self._importers: dict[str, set[str]] = {}
        self._passers: dict[str, set[str]] = {}
        for path, tree in trees.items():
            self._add(path, tree)

    def _add(self, path: str, tree: ast.Module) -> None:
        here = PurePosixPath(path).parent
        for name in names_in(tree):
            parts = self._exports.get(name, name).split(".")
            prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
            modules = [prefix for prefix in prefixes if prefix in self._files]
            for module in modules:
                files = self._files[module]
                # Helpers of tests have bare names, and several folders may have the same one.
                beside = [file for file in files if PurePosixPath(file).parent == here]
                edges = self._importers if module == modules[-1] else self._passers
                for file in beside or files:
                    edges.setdefault(file, set()).add(path)
        for folder in (here, *here.parents):
            if is_test(path):
                self._importers.setdefault(str(folder / "conftest.py"), set()).add(path)

    def reach(self, changed: Iterable[str]) -> set[str]:
        """Return every file that imports a changed one through any number of others, and those themselves."""
        waiting = deque(changed)
        # A package on the way to a module is executed too, but what else it imports is not the importer's.
        for path in list(waiting):
            waiting.extend(self._passers.get(path, ()))
        reached = set(waiting)
        while waiting:
            new = self._importers.get(waiting.popleft(), set()) - reached
            reached |= new
            waiting.extend(new)
        return reached


def is_package(path: str) -> bool:
    """Return whether a file is an ``__init__``."""
    return PurePosixPath(path).name == "__init__.py"


def is_test(path: str) -> bool:
    """Return whether pytest collects a file."""
    name = PurePosixPath(path).name
    in_folder = any(part == "tests" for part in PurePosixPath(path).parts[:-1])
    return in_folder and name.startswith("test_") and name.endswith(".py")


def module_name(path: str) -> str:
    """Return the name under which a file is imported."""
    parts = list(PurePosixPath(path).with_suffix("").parts)
    if "src" in parts:
        parts = parts[parts.index("src") + 1 :]
    elif parts[0] != "mindspeed_core":
        # Tests, tools and examples import what lies beside them.
        parts = parts[-2:] if is_package(path) else parts[-1:]
    return ".".join(parts[:-1] if is_package(path) else parts)


def names_in(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a module imports, and those in its text apart from docstrings."""
    described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.Name):
            # _HERE + "step"
            if node.left.id in constants and isinstance(node.right, ast.Constant):
                yield constants[node.left.id] + str(node.right.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            if node.value in HOSTS:
                yield HOSTS[node.value]
            yield from (name.replace(":", ".") for name in _DOTTED.findall(node.value))


def affected(changed: Iterable[str], sources: Mapping[str, str]) -> list[str]:
    """Return the test files to run, sorted.

    Args:
        changed: the changed files, deleted ones included.
        sources: text of every Python file by path, as they are now.
    """
    changed = set(changed)
    tests = {path for path in sources if is_test(path)}
    if changed & set(EVERYTHING):
        return sorted(tests)
    # Data beside tests (tables, recorded numbers, a made package) belongs to the tests of its folder.
    folders = {PurePosixPath(path).parent for path in changed if not path.endswith(".py")}
    beside = {test for test in tests if PurePosixPath(test).parent in folders}
    if any(path.endswith(".md") for path in changed):
        beside |= {test for test in tests if test.startswith("tests/docs/")}
    if any(path.startswith("tests/plugins/") for path in changed):
        # Installed for every test, and used by flags.
        beside |= {test for test in tests if test.startswith("tests/")}
    deleted = {path: "" for path in changed if path.endswith(".py") and path not in sources}
    return sorted((Imports({**sources, **deleted}).reach(changed) & tests) | beside)


def git(*arguments: str) -> str:
    """Return what git prints."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def default_base() -> str:
    """Return the point where this branch left main; on main itself, the commit before the last."""
    try:
        base = git("merge-base", "HEAD", "main")
    except subprocess.CalledProcessError:
        return "HEAD~1"
    return "HEAD~1" if base == git("rev-parse", "HEAD") else base


def main(arguments: list[str]) -> int:
    """Print the affected test files, one a line."""
    base = arguments[0] if arguments else default_base()
    changed = [*git("diff", "--name-only", base).splitlines()]
    changed += git("ls-files", "--others", "--exclude-standard").splitlines()
    known = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py").splitlines()
    sources = {path: (ROOT / path).read_text("utf-8") for path in known if (ROOT / path).exists()}
    print(*affected(changed, sources), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Uses of torch_npu in sources: every call and every mention, by file and line.

The sources are read, not imported. What is followed is what people write: imports in any scope, names bound
to them, ``torch.npu``, ``torch.ops.npu``, and ``self.runtime()``, which a platform of ours answers with
``torch.npu``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_core.discovery.installed import package_places
from mindspeed_core.errors import UserError

ROOTS = ("torch_npu", "torch.npu", "torch.ops.npu", "torch.ops.atb")
ALIASES: Mapping[str, str] = {"self.runtime()": "torch.npu"}
_ASKS = frozenset({"call_missing", "kernel_of", "hasattr", "getattr"})
"""Functions by which sources ask for a name before they call it."""
EXCUSE = "needs an NPU:"
"""``# needs an NPU: REASON`` on a call's first line excuses it from running; its name is still checked."""


@dataclass(frozen=True)
class ApiUse:
    """One use of torch_npu in a source.

    Attributes:
        path: the file.
        line: first line of the expression.
        last_line: its last line.
        name: what is used, ``torch_npu.npu_swiglu``.
        is_call: whether it is called here; a mention is handed on and may be called elsewhere.
        excuse: why it cannot run without a device; empty for everything that must.
        keywords: names of the arguments that a call passes by name.
        positional: number of those that it passes by position, unpacked ones not counted.
    """

    path: Path
    line: int
    last_line: int
    name: str
    is_call: bool
    excuse: str = ""
    keywords: tuple[str, ...] = ()
    positional: int = 0

    def __str__(self) -> str:
        """Return file, line and name, as failures show it."""
        return f"{self.path}:{self.line}: {self.name}"


def api_uses(roots: Iterable[Path]) -> list[ApiUse]:
    """Return every use of torch_npu in the Python files below folders, in order of file and line."""
    files = sorted({path for root in roots for path in (root.rglob("*.py") if root.is_dir() else [root])})
    return [use for path in files for use in uses_of(path.read_text(encoding="utf-8"), path)]


def uses_of(text: str, path: Path) -> list[ApiUse]:
    """Return every use of torch_npu in the text of one source; ``path`` is where it is."""
    if not any(word in text for word in ("torch_npu", ".npu", ".atb", *ALIASES)):
        return []
    lines = text.splitlines()
    found: list[ApiUse] = []
    for node, name in used_nodes(ast.parse(text)):
        excuse = lines[node.lineno - 1].partition(EXCUSE)[2].strip()
        last = node.end_lineno or node.lineno
        if isinstance(node, ast.Call):
            given = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
            count = sum(not isinstance(argument, ast.Starred) for argument in node.args)
            found.append(ApiUse(path, node.lineno, last, name, True, excuse, given, count))
        else:
            found.append(ApiUse(path, node.lineno, last, name, False, excuse))
    return sorted(found, key=lambda use: (use.line, use.name))


def used_nodes(tree: ast.AST) -> Iterator[tuple[ast.Call | ast.Attribute | ast.Name, str]]:
    """Yield the expressions of a source that use torch_npu, calls and mentions, with what they use."""
    names = _bound_names(tree)
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Call, ast.Attribute, ast.Name)) or node in inner:
            continue
        target = node.func if isinstance(node, ast.Call) else node
        name = _path(target, names)
        if name is None or not _is_used(name):
            continue
        inner.update(ast.walk(target))
        if not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Load):
            yield node, name


def guards(folders: Iterable[Path]) -> Mapping[str, set[str]]:
    """Return the names that sources ask for before they call them, with the arguments that they ask for."""
    found: dict[str, set[str]] = {}
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(f"{word}(" in text for word in _ASKS):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _ASKS:
                texts = _texts(node)
                for name in texts:
                    found.setdefault(name, set()).update(texts)
    return found


def _texts(call: ast.Call) -> list[str]:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return [
        node.value
        for argument in given
        for node in ast.walk(argument)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def package_folders(packages: Iterable[str]) -> list[Path]:
    """Find the folders (or files) of import packages without importing them.

    Raises:
        UserError: there is no such package.
    """
    folders: list[Path] = []
    for name in packages:
        places = package_places(name)
        if not places:
            raise UserError(f"--source {name}: no such package is installed")
        folders += places
    return folders


def _is_used(name: str) -> bool:
    """Return whether a path leads to something inside the package; naming a namespace is no use."""
    return name not in ROOTS and any(name.startswith(root + ".") for root in ROOTS)


def _bound_names(tree: ast.AST) -> dict[str, str]:
    """Map the names of a module to what they mean, scopes taken together."""
    names: dict[str, str] = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                if item.name.partition(".")[0] == "torch_npu":
                    names[item.asname or "torch_npu"] = item.name if item.asname else "torch_npu"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch_npu":
            for item in node.names:
                names[item.asname or item.name] = f"{node.module}.{item.name}"
    for node, name in _assignments(tree):
        found = _path(node, names)
        if found is not None and (found in ROOTS or _is_used(found)):
            names[name] = found
    return names


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.value, node.targets[0].id


def _path(node: ast.expr, names: Mapping[str, str]) -> str | None:
    """Return the dotted path that an expression means; None when it is none."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        parent = _path(node.value, names)
        return None if parent is None else f"{parent}.{node.attr}"
    if isinstance(node, ast.Call):
        text = ast.unparse(node)
        if text in ALIASES:
            return ALIASES[text]
        return _named_attribute(node, names)
    return None


def _named_attribute(node: ast.Call, names: Mapping[str, str]) -> str | None:
    """Resolve ``getattr(torch_npu, "name")``."""
    if not (
        isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and len(node.args) >= 2
    ):
        return None
    parent, name = _path(node.args[0], names), node.args[1]
    if parent is None or not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
        return None
    return f"{parent}.{name.value}"

"""Modules that a run loads: those reached from its host's stages and from its active features, read only."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache

from mindspeed_core.discovery.installed import package_places

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?=:|\Z)")


def reached(starts: Iterable[str], packages: Iterable[str], *, lazily: bool) -> set[str]:
    """Return the modules of some packages that are reached from others by imports.

    Args:
        starts: modules to begin with.
        packages: import packages to stay in.
        lazily: follow imports in functions and names in text too, not only what importing a module loads.
    """
    allowed = set(packages)
    waiting, seen = deque(starts), set(starts)
    while waiting:
        for name in _mentioned(waiting.popleft(), lazily):
            module = _existing(name)
            if module and module not in seen and module.partition(".")[0] in allowed:
                seen.add(module)
                waiting.append(module)
    return seen


@lru_cache(maxsize=4096)
def _text(module: str) -> str | None:
    first, *rest = module.split(".")
    for place in package_places(first):
        file = place.joinpath(*rest)
        for path in (file / "__init__.py", file.with_suffix(".py")):
            if path.is_file():
                return path.read_text(encoding="utf-8")
    return None


def _existing(name: str) -> str:
    """Return the module in a dotted name whose last part may be something inside one."""
    if _text(name) is not None:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent and _text(parent) is not None else ""


@lru_cache(maxsize=4096)
def _mentioned(module: str, lazily: bool) -> tuple[str, ...]:
    text = _text(module)
    return tuple(_names(ast.parse(text), lazily)) if text else ()


def _names(node: ast.AST, lazily: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{item.name}" for item in child.names)
        elif isinstance(child, ast.Import):
            yield from (item.name for item in child.names)
        elif _is_left_out(child, lazily):
            continue
        elif lazily and isinstance(child, ast.Constant) and isinstance(child.value, str):
            found = _DOTTED.match(child.value)
            if found:
                yield found.group()
        else:
            yield from _names(child, lazily)


def _is_left_out(node: ast.AST, lazily: bool) -> bool:
    if isinstance(node, ast.If):
        return getattr(node.test, "id", "") == "TYPE_CHECKING"
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not lazily

"""Faults of NPU code, drawn from the code itself by rules, to see that tests find them.

A fault is a file and its changed text. The rules are the mistakes that people make: a keyword is dropped, two
arguments are swapped, a dtype or a layout is another one, a length is off by one, a wait is missing. All but
the waits are made in functions that use torch_npu. What cannot change anything (a keyword that says its
default) is left out where it can be told.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from mindspeed_megatron.devices.torch_npu_uses import ApiUse, uses_of

_DTYPES = {
    "float32": "bfloat16",
    "bfloat16": "float32",
    "float64": "float32",
    "int32": "int64",
    "int64": "int32",
    "uint8": "int8",
    "int8": "uint8",
    "bool": "uint8",
}
_LAYOUTS = {"SBH": "BSH", "BSH": "SBH", "BNSD": "BSND", "BSND": "BNSD", "TND": "BSH"}
_WAITS = ("wait", "wait_event", "wait_stream")


@dataclass(frozen=True)
class Fault:
    """A change of one file.

    Attributes:
        rule: ``dropped keyword``, ``swapped arguments``, ``dtype``, ``layout``, ``length``,
            ``missing wait``, or ``named`` for one that was written down.
        path: the file.
        line: of the change.
        change: old and new text, for the report.
        text: the changed file.
    """

    rule: str
    path: Path
    line: int
    change: str
    text: str

    def __str__(self) -> str:
        """Return place, rule and change."""
        return f"{self.path}:{self.line}: {self.rule}: {self.change}"


def candidates(folders: Iterable[Path], defaults: Mapping[str, Mapping[str, object]]) -> list[Fault]:
    """Return every fault that the rules make of the Python files below folders.

    Args:
        folders: sources.
        defaults: the arguments with a default of each name of torch_npu, for keywords that say it.
    """
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return [fault for path in files for fault in faults_of(path.read_text(encoding="utf-8"), path, defaults)]


def faults_of(text: str, path: Path, defaults: Mapping[str, Mapping[str, object]]) -> list[Fault]:
    """Return every fault that the rules make of one source."""
    uses = [use for use in uses_of(text, path) if use.is_call and not use.excuse]
    waits = [f".{name}(" for name in _WAITS]
    if not uses and not any(wait in text for wait in waits):
        return []
    tree = ast.parse(text)
    return [
        Fault(rule, path, line, what, ast.unparse(ast.fix_missing_locations(changed)))
        for rule, line, what, changed in _changes(tree, uses, defaults)
    ]


def named(path: Path, old: str, new: str) -> Fault:
    """Return a fault that replaces text of a file.

    Raises:
        ValueError: the text does not occur exactly once.
    """
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise ValueError(f"{path}: {old!r} occurs {text.count(old)} times, not once")
    line = text[: text.index(old)].count("\n") + 1
    return Fault("named", path, line, f"{old} is {new}", text.replace(old, new))


def drawn(faults: Iterable[Fault], count: int, seed: int = 0) -> list[Fault]:
    """Draw faults, as many of each rule as there are, in turn."""
    by_rule: dict[str, list[Fault]] = {}
    for fault in faults:
        by_rule.setdefault(fault.rule, []).append(fault)
    generator = random.Random(seed)
    for of_rule in by_rule.values():
        generator.shuffle(of_rule)
    found: list[Fault] = []
    while len(found) < count and any(by_rule.values()):
        for rule in sorted(by_rule):
            if by_rule[rule] and len(found) < count:
                found.append(by_rule[rule].pop())
    return found


_Change = tuple[str, int, str, ast.Module]


def _changes(
    tree: ast.Module, uses: Iterable[ApiUse], defaults: Mapping[str, Mapping[str, object]]
) -> Iterator[_Change]:
    names = {(use.line, use.last_line): use.name for use in uses}
    nodes = list(ast.walk(tree))
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and _lines(node) in names and not _asks(node.func)
    ]
    for call in calls:
        yield from _dropped(tree, nodes, call, defaults.get(names[_lines(call)], {}))
        yield from _swapped(tree, nodes, call)
    functions = [
        node
        for node in nodes
        if isinstance(node, ast.FunctionDef) and any(call in set(ast.walk(node)) for call in calls)
    ]
    inside = {id(inner): inner for function in functions for inner in _body(function)}
    for node in inside.values():
        yield from _other_dtype(tree, nodes, node)
        yield from _other_layout(tree, nodes, node)
        yield from _longer(tree, nodes, node)
    for node in nodes:
        yield from _without_wait(tree, nodes, node)


def _asks(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id in ("hasattr", "getattr")


def _lines(node: ast.Call) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def _body(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function's statements, without its signature and docstring."""
    for statement in function.body:
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            yield from ast.walk(statement)


def _changed(
    tree: ast.Module, nodes: list[ast.AST], node: ast.AST, change: Callable[[ast.AST], None]
) -> ast.Module:
    """Return a copy of a tree in which ``change`` was made to the copy of a node."""
    copy = deepcopy(tree)
    change(list(ast.walk(copy))[nodes.index(node)])
    return copy


def _dropped(
    tree: ast.Module, nodes: list[ast.AST], call: ast.Call, defaults: Mapping[str, object]
) -> Iterator[_Change]:
    for place, keyword in enumerate(call.keywords):
        default = defaults.get(keyword.arg or "", ...)
        says_it = isinstance(keyword.value, ast.Constant) and keyword.value.value == default
        if keyword.arg is None or default is ... or says_it:
            # Without a default the call would not even be understood.
            continue

        def drop(node: ast.AST, place: int = place) -> None:
            assert isinstance(node, ast.Call)
            del node.keywords[place]

        yield (
            "dropped keyword",
            keyword.value.lineno,
            f"{ast.unparse(call.func)} without {ast.unparse(keyword)}",
            _changed(tree, nodes, call, drop),
        )


def _swapped(tree: ast.Module, nodes: list[ast.AST], call: ast.Call) -> Iterator[_Change]:
    for place, (one, other) in enumerate(zip(call.args, call.args[1:])):
        starred = isinstance(one, ast.Starred) or isinstance(other, ast.Starred)
        if starred or ast.unparse(one) == ast.unparse(other):
            continue

        def swap(node: ast.AST, place: int = place) -> None:
            assert isinstance(node, ast.Call)
            node.args[place : place + 2] = reversed(node.args[place : place + 2])

        what = f"{ast.unparse(call.func)}(… {ast.unparse(other)}, {ast.unparse(one)} …)"
        yield "swapped arguments", one.lineno, what, _changed(tree, nodes, call, swap)


def _other_dtype(tree: ast.Module, nodes: list[ast.AST], node: ast.AST) -> Iterator[_Change]:
    if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "torch" or node.attr not in _DTYPES:
        return
    other = _DTYPES[node.attr]

    def change(changed: ast.AST) -> None:
        assert isinstance(changed, ast.Attribute)
        changed.attr = other

    yield "dtype", node.lineno, f"torch.{node.attr} is torch.{other}", _changed(tree, nodes, node, change)


def _other_layout(tree: ast.Module, nodes: list[ast.AST], node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Constant) and node.value in _LAYOUTS:
        other = _LAYOUTS[str(node.value)]

        def rename(changed: ast.AST) -> None:
            assert isinstance(changed, ast.Constant)
            changed.value = other

        yield "layout", node.lineno, f"{node.value} is {other}", _changed(tree, nodes, node, rename)
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if not is_method or node.func.attr not in ("transpose", "permute", "t", "mT"):  # type: ignore[attr-defined]
        return

    def leave_out(changed: ast.AST) -> None:
        assert isinstance(changed, ast.Call)
        assert isinstance(changed.func, ast.Attribute)
        # Contiguous is all that is left of it.
        changed.func.attr, changed.args, changed.keywords = "contiguous", [], []

    yield (
        "layout",
        node.lineno,  # type: ignore[attr-defined]
        f"without {ast.unparse(node)}",
        _changed(tree, nodes, node, leave_out),
    )


def _longer(tree: ast.Module, nodes: list[ast.AST], node: ast.AST) -> Iterator[_Change]:
    if not isinstance(node, (ast.Subscript, ast.Call)):
        return
    text = ast.unparse(node)
    is_length = text.startswith("len(") or ".shape[" in text[-12:] or text.endswith((".size()", ".numel()"))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size":
        is_length = True
    if not is_length or (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)):
        return
    if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
        return
    parents = [one for one in nodes if any(child is node for child in ast.iter_child_nodes(one))]
    if not parents or isinstance(parents[0], ast.Attribute):
        return

    def lengthen(changed: ast.AST) -> None:
        for field, value in ast.iter_fields(changed):
            if isinstance(value, list):
                setattr(changed, field, [_plus_one(one) if _is(one, text) else one for one in value])
            elif _is(value, text):
                setattr(changed, field, _plus_one(value))

    line = node.lineno
    yield "length", line, f"{text} + 1", _changed(tree, nodes, parents[0], lengthen)


def _is(node: object, text: str) -> bool:
    return isinstance(node, ast.expr) and ast.unparse(node) == text


def _plus_one(node: ast.expr) -> ast.expr:
    return ast.BinOp(node, ast.Add(), ast.Constant(1))


def _without_wait(tree: ast.Module, nodes: list[ast.AST], node: ast.AST) -> Iterator[_Change]:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return
    function = node.value.func
    if not isinstance(function, ast.Attribute) or function.attr not in _WAITS:
        return
    if function.attr == "wait" and len(node.value.args) + len(node.value.keywords) > 1:
        # Of a store, which is no stream.
        return

    def leave_out(changed: ast.AST) -> None:
        assert isinstance(changed, ast.Expr)
        changed.value = ast.Constant(None)

    yield "missing wait", node.lineno, f"without {ast.unparse(node)}", _changed(tree, nodes, node, leave_out)

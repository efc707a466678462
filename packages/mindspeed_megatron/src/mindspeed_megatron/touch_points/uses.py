"""Uses of megatron-core in sources of ours: imports, calls, subclasses, members, targets of patches.

The sources are read, not imported. A use is followed as people write it: imports in any scope, names bound to
them, parameters annotated with a class of megatron-core, ``super()``, names in text such as
``"megatron.core.utils:get_pg_rank"``, and calls of methods whose name says the class, see `METHODS`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_megatron.touch_points.untyped import METHODS

ROOT = "megatron.core"
_TEXT = re.compile(r"megatron\.core(\.\w+)+(:\w+(\.\w+)*)?\Z")
_FORGIVING = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"})


@dataclass(frozen=True, order=True)
class CallShape:
    """The form of a call: what it hands over, compared with what a version takes.

    Attributes:
        positional: number of arguments by position, without the instance.
        keywords: arguments by name.
        exact: nothing is unpacked into it, so that what a version demands must be among them.
    """

    positional: int
    keywords: tuple[str, ...] = ()
    exact: bool = True


@dataclass
class Use:
    """Everything that sources do with one symbol.

    Attributes:
        modules: modules that use it.
        calls: the forms in which it is called.
        replaced: modules that replace, wrap or override it, so that its source and parameters count.
        optional: every use asks first, or goes on without it.
    """

    modules: set[str] = field(default_factory=set)
    calls: set[CallShape] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    optional: bool = True


def uses_of(sources: Mapping[str, str]) -> dict[str, Use]:
    """Return the uses of every symbol, by dotted name.

    Args:
        sources: text by name of the module.
    """
    uses: dict[str, Use] = {}
    for module, text in sources.items():
        if ROOT in text or any(f".{name}(" in text for name in METHODS):
            _Reader(module, uses).read(ast.parse(text))
    return uses


def package_sources(folders: Iterable[Path]) -> dict[str, str]:
    """Return the text of every module below the folders of import packages, by the module's name."""
    sources = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            sources[name] = path.read_text(encoding="utf-8")
    return sources


class _Reader:
    """Reads one module into the uses."""

    def __init__(self, module: str, uses: dict[str, Use]) -> None:
        self._module = module
        self._uses = uses
        self._names: dict[str, str] = {}
        self._texts: dict[str, str] = {}

    def read(self, tree: ast.Module) -> None:
        for node, _ in _imports(tree):
            for bound, point in _bound(node):
                self._names[bound] = point
        for node, forgiven in _imports(tree, typing=False):
            for _, point in _bound(node):
                self._note(point, optional=forgiven)
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
                for target in statement.targets:
                    if isinstance(target, ast.Name) and isinstance(statement.value.value, str):
                        self._texts[target.id] = statement.value.value
        described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        self._visit(tree, {}, described, False)

    def _note(self, point: str, *, optional: bool = False) -> Use:
        use = self._uses.setdefault(point, Use())
        use.modules.add(self._module)
        use.optional = use.optional and optional
        return use

    def _visit(self, node: ast.AST, typed: Mapping[str, str], described: set[int], forgiven: bool) -> None:
        """Walk a tree; ``typed`` maps names to the class that an annotation gives them."""
        if isinstance(node, ast.If) and _last(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            typed = {**typed, **self._annotated(node)}
            for decorator in node.decorator_list:
                self._visit(decorator, typed, described, forgiven)
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self._visit(default, typed, described, forgiven)
            for statement in node.body:
                self._visit(statement, typed, described, forgiven)
            return
        if isinstance(node, ast.ClassDef):
            typed = self._class(node, typed)
        elif isinstance(node, ast.Call):
            self._call(node, typed, forgiven)
        elif isinstance(node, ast.Attribute):
            point = self._path(node, typed)
            if point is not None:
                if isinstance(node.ctx, ast.Load):
                    self._note(point, optional=forgiven)
                return
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            self._text(node.value, forgiven=True)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            joined = self._joined(node)
            if joined is not None:
                self._text(joined, forgiven=True)
                return
        if isinstance(node, ast.Try):
            lenient = forgiven or any(map(_forgives, node.handlers))
            for statement in node.body:
                self._visit(statement, typed, described, lenient)
            for part in (*node.handlers, *node.orelse, *node.finalbody):
                self._visit(part, typed, described, forgiven)
            return
        if isinstance(node, ast.With) and any("suppress" in ast.unparse(i.context_expr) for i in node.items):
            forgiven = True
        for child in ast.iter_child_nodes(node):
            self._visit(child, typed, described, forgiven)

    def _annotated(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
        arguments = function.args
        given = {}
        for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            point = self._names.get(_dotted(_written(item.annotation)))
            # A parameter hides an import of the same name.
            given[item.arg] = point or ""
        return given

    def _class(self, node: ast.ClassDef, typed: Mapping[str, str]) -> dict[str, str]:
        """Note bases and what is overridden; return names with ``self`` as an instance of the bases."""
        bases = [point for base in node.bases if (point := self._path(_written(base), typed)) is not None]
        own = {
            item.name: item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        for base in bases:
            use = self._note(base)
            if "__init__" in own:
                # What megatron-core hands to the class it hands to ours too.
                use.replaced.add(self._module)
            for name in own:
                if name not in ("__init__", "__new__", "__repr__", "__str__"):
                    self._note(f"{base}.{name}", optional=True).replaced.add(self._module)
            for inner in ast.walk(node):
                self._inherited(inner, base, own)
        return dict(typed)

    def _inherited(self, node: ast.AST, base: str, own: Mapping[str, ast.AST]) -> None:
        """Note calls of ``super().name(…)``, and members of the base that the class reads."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            above = node.func.value
            if isinstance(above, ast.Call) and _last(above.func) == "super" and not above.args:
                point = base if node.func.attr == "__init__" else f"{base}.{node.func.attr}"
                self._note(point).calls.add(_shape(node))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            own_member = getattr(node.value, "id", "") != "self" or node.attr in own
            if not own_member:
                self._note(f"{base}.{node.attr}", optional=True)

    def _call(self, node: ast.Call, typed: Mapping[str, str], forgiven: bool) -> None:
        name = _last(node.func)
        if name in ("getattr", "hasattr") and len(node.args) >= 2:
            parent, attribute = self._path(node.args[0], typed), node.args[1]
            if (
                parent is not None
                and isinstance(attribute, ast.Constant)
                and isinstance(attribute.value, str)
            ):
                asks = name == "hasattr" or len(node.args) == 3
                self._note(f"{parent}.{attribute.value}", optional=asks or forgiven)
            return
        if name.endswith("Patch"):
            self._patch(node)
        point = self._path(node.func, typed)
        if point is not None:
            self._note(point, optional=forgiven).calls.add(_shape(node))
        elif isinstance(node.func, ast.Attribute):
            for method in METHODS.get(name, ()):
                # Which of several classes it is nobody says, nor whether the caller asked before.
                self._note(method, optional=True).calls.add(_shape(node))

    def _patch(self, node: ast.Call) -> None:
        """Note the target of a declared patch, required unless it says otherwise."""
        named = {item.arg: item.value for item in node.keywords}
        target = named.get("target", node.args[0] if node.args else None)
        text = target.value if isinstance(target, ast.Constant) else self._joined(target)
        required = named.get("required")
        optional = isinstance(required, ast.Constant) and required.value is False
        kind = named.get("kind")
        adds = isinstance(kind, ast.Constant) and kind.value == "add"
        if isinstance(text, str) and _TEXT.match(text):
            self._note(text.replace(":", "."), optional=optional or adds).replaced.add(self._module)

    def _text(self, text: str, *, forgiven: bool) -> None:
        if _TEXT.match(text):
            use = self._note(text.replace(":", "."), optional=forgiven)
            if ":" in text:
                use.replaced.add(self._module)

    def _joined(self, node: ast.AST | None) -> str | None:
        """Return the text of ``_PREFIX + "name"``."""
        if isinstance(node, ast.Name):
            return self._texts.get(node.id)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self._joined(node.left), self._joined(node.right)
            return None if left is None or right is None else left + right
        return None

    def _path(self, node: ast.AST | None, typed: Mapping[str, str]) -> str | None:
        """Return the dotted name of megatron-core that an expression means; None when it is none."""
        if isinstance(node, ast.Name):
            return (typed[node.id] if node.id in typed else self._names.get(node.id)) or None
        if isinstance(node, ast.Attribute):
            parent = self._path(node.value, typed)
            return None if parent is None else f"{parent}.{node.attr}"
        return None


def _imports(
    node: ast.AST, *, typing: bool = True, forgiven: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield imports of any scope, and whether a failure is caught there."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, forgiven
        elif isinstance(child, ast.If) and _last(child.test) == "TYPE_CHECKING" and not typing:
            continue
        elif isinstance(child, ast.Try):
            lenient = forgiven or any(map(_forgives, child.handlers))
            body = ast.Module(body=child.body, type_ignores=[])
            rest = ast.Module(body=[*child.orelse, *child.finalbody], type_ignores=[])
            yield from _imports(body, typing=typing, forgiven=lenient)
            yield from _imports(rest, typing=typing, forgiven=forgiven)
            for handler in child.handlers:
                yield from _imports(handler, typing=typing, forgiven=forgiven)
        elif isinstance(child, ast.With):
            lenient = forgiven or any("suppress" in ast.unparse(item.context_expr) for item in child.items)
            yield from _imports(child, typing=typing, forgiven=lenient)
        else:
            yield from _imports(child, typing=typing, forgiven=forgiven)


def _bound(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield local names with the dotted names of megatron-core that an import binds to them."""
    if isinstance(node, ast.ImportFrom):
        source = node.module or ""
        if not node.level and (source == ROOT or source.startswith(ROOT + ".")):
            for item in node.names:
                yield item.asname or item.name, f"{source}.{item.name}"
        elif not node.level and source == "megatron":
            for item in node.names:
                if item.name == "core":
                    yield item.asname or item.name, ROOT
        return
    for item in node.names:
        if item.name.startswith(ROOT + "."):
            yield item.asname or item.name, item.name


def _forgives(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(_last(kind) in _FORGIVING for kind in kinds)


def _written(annotation: ast.AST | None) -> ast.AST | None:
    """Return the class in ``Class``, ``Class | None``, ``type[Class]`` and ``Class[T]``."""
    if isinstance(annotation, ast.BinOp):
        return _written(annotation.left)
    if isinstance(annotation, ast.Subscript):
        outer = _last(annotation.value)
        return _written(annotation.slice) if outer in ("Optional", "type") else annotation.value
    return annotation


def _shape(node: ast.Call) -> CallShape:
    unpacks = any(isinstance(item, ast.Starred) for item in node.args) or any(
        item.arg is None for item in node.keywords
    )
    count = sum(not isinstance(item, ast.Starred) for item in node.args)
    names = tuple(sorted(item.arg for item in node.keywords if item.arg is not None))
    return CallShape(count, names, not unpacks)


def _dotted(node: ast.AST | None) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        parent = _dotted(node.value)
        return f"{parent}.{node.attr}" if parent else ""
    return ""


def _last(node: ast.AST | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")

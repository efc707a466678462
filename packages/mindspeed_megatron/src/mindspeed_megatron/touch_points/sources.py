"""Facts about the symbols of a megatron-core, read from its sources: a folder or a wheel, nothing imported.

Names are followed as Python would: re-exports of packages, aliases, bases of classes. What leads out of
megatron (torch, TransformerEngine) is not followed; members that only such a base can have count as there.
"""

from __future__ import annotations

import ast
import hashlib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

MODULE, CLASS, FUNCTION, VALUE, FOREIGN = "module", "class", "function", "value", "foreign"
"""Kinds of symbols; a field, a property and an attribute that methods set are values."""
_PREFIX = "megatron"
_DEEPEST = 40

Read = Callable[[str], "str | None"]


@dataclass(frozen=True)
class Symbol:
    """Definition that a version of megatron-core has under a name.

    Attributes:
        kind: `MODULE`, `CLASS`, `FUNCTION`, `VALUE`, or `FOREIGN` for what a class or module outside megatron
            brings.
        parameters: of a function or of the making of a class, as in a ``def``, without annotations; a default
            is ``=``. None where they cannot be read.
        fields: of a dataclass, with those of its bases.
        digest: of the source without comments and docstrings; empty for values.
        is_method: the first parameter is the instance or the class.
    """

    kind: str
    parameters: tuple[str, ...] | None = None
    fields: tuple[str, ...] = ()
    digest: str = ""
    is_method: bool = False


@dataclass
class _Module:
    name: str
    is_package: bool
    text: str
    names: dict[str, ast.AST] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)


class Sources:
    """The sources of one megatron-core.

    Args:
        read: returns the text of a file by its path below the folder of installed packages,
            ``megatron/core/utils.py``; None where it is absent.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._modules: dict[str, _Module | None] = {}
        self._found: dict[str, Symbol | None] = {}

    @classmethod
    def of_folder(cls, folder: Path) -> Sources:
        """Read the folder that contains ``megatron``."""

        def read(path: str) -> str | None:
            file = folder / path
            return file.read_text(encoding="utf-8") if file.is_file() else None

        return cls(read)

    @classmethod
    def of_wheel(cls, wheel: Path) -> Sources:
        """Read a wheel."""
        archive = zipfile.ZipFile(wheel)
        members = set(archive.namelist())
        return cls(lambda path: archive.read(path).decode("utf-8") if path in members else None)

    def symbol(self, point: str) -> Symbol | None:
        """Return what a dotted name stands for; None where this version has no such name."""
        if point not in self._found:
            self._found[point] = self._symbol(point)
        return self._found[point]

    def _symbol(self, point: str) -> Symbol | None:
        found = self._locate(point)
        if found is None:
            return None
        module, node, owner = found
        if module is None:
            return Symbol(FOREIGN)
        if node is None:
            return Symbol(MODULE)
        if isinstance(node, ast.ClassDef):
            made = self._making(module, node)
            fields = tuple(name for name, _ in self._fields(module, node))
            return Symbol(CLASS, made, fields, _digest(module.text, node))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = {_last_name(decorator) for decorator in node.decorator_list}
            if decorators & {"property", "cached_property"}:
                return Symbol(VALUE, digest=_digest(module.text, node))
            method = owner is not None and "staticmethod" not in decorators
            return Symbol(FUNCTION, _parameters(node.args), (), _digest(module.text, node), method)
        return Symbol(VALUE)

    def _locate(
        self, point: str, depth: int = 0
    ) -> tuple[_Module | None, ast.AST | None, ast.ClassDef | None] | None:
        """Return the module, the definition (None for the module itself) and the class it is a member of.

        A module of None says that the name leads out of megatron.
        """
        if depth > _DEEPEST:
            return None
        if point.partition(".")[0] != _PREFIX:
            return None, None, None
        parts = point.split(".")
        for length in range(len(parts), 0, -1):
            module = self._module(".".join(parts[:length]))
            if module is not None:
                return self._inside(module, parts[length:], depth)
        return None

    def _inside(
        self, module: _Module, rest: list[str], depth: int
    ) -> tuple[_Module | None, ast.AST | None, ast.ClassDef | None] | None:
        if not rest:
            return module, None, None
        name, *further = rest
        node = module.names.get(name)
        if isinstance(node, ast.ClassDef):
            return self._member(module, node, further, depth) if further else (module, node, None)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None if further else (module, node, None)
        if name in module.imports:
            source, attribute = module.imports[name]
            tail = [attribute, *further] if attribute else further
            return self._locate(".".join([source, *tail]), depth + 1)
        if node is not None:
            alias = _dotted(node)
            if alias and alias.partition(".")[0] != name:
                found = self._inside(module, [*alias.split("."), *further], depth + 1)
                if found is not None:
                    return found
            return (module, node, None) if not further else (None, None, None)
        for star in module.stars:
            brought = self._locate(f"{star}.{name}", depth + 1)
            if brought is not None and brought[0] is not None:
                return self._locate(".".join([star, *rest]), depth + 1)
        return None

    def _member(
        self, module: _Module, klass: ast.ClassDef, rest: list[str], depth: int
    ) -> tuple[_Module | None, ast.AST | None, ast.ClassDef | None] | None:
        name, *further = rest
        foreign = False
        for holder, base in self._lineage(module, klass):
            if base is None or holder is None:
                foreign = True
                continue
            node = _members(base).get(name)
            if node is None:
                continue
            if isinstance(node, ast.ClassDef) and further:
                return self._member(holder, node, further, depth + 1)
            return (holder, node, base) if not further else (None, None, None)
        return (None, None, None) if foreign else None

    def _lineage(
        self, module: _Module, klass: ast.ClassDef, depth: int = 0
    ) -> Iterator[tuple[_Module | None, ast.ClassDef | None]]:
        """Yield a class and its bases, nearest first; (None, None) for one outside megatron."""
        yield module, klass
        if depth > _DEEPEST:
            return
        for base in klass.bases:
            written = base.value if isinstance(base, ast.Subscript) else base
            name = _dotted(written)
            if name in ("object", "ABC", "Protocol", "Generic", "Enum", "enum.Enum", "enum.IntEnum"):
                continue
            found = self._inside(module, name.split("."), 0) if name else None
            if found is not None and found[0] is not None and isinstance(found[1], ast.ClassDef):
                yield from self._lineage(found[0], found[1], depth + 1)
            else:
                yield None, None

    def _making(self, module: _Module, klass: ast.ClassDef) -> tuple[str, ...] | None:
        """Return the parameters of the making of a class, without the instance."""
        for holder, base in self._lineage(module, klass):
            if base is None or holder is None:
                return None
            made = _members(base).get("__init__")
            if isinstance(made, ast.FunctionDef):
                return _parameters(made.args)[1:]
            if _is_dataclass(base):
                return tuple(name + given for name, given in self._fields(holder, base))
        return None if klass.keywords or klass.bases else ()

    def _fields(self, module: _Module, klass: ast.ClassDef) -> list[tuple[str, str]]:
        """Return the fields of a dataclass, its bases' first, with ``=`` where they have a default."""
        if not _is_dataclass(klass):
            return []
        fields: dict[str, str] = {}
        for _, base in reversed(list(self._lineage(module, klass))):
            if base is None or not _is_dataclass(base):
                continue
            for node in base.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    if "ClassVar" in ast.unparse(node.annotation):
                        continue
                    fields[node.target.id] = "=" if node.value is not None else ""
        return list(fields.items())

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            self._modules[name] = self._parsed(name)
        return self._modules[name]

    def _parsed(self, name: str) -> _Module | None:
        path = name.replace(".", "/")
        if name == _PREFIX:
            return _Module(name, True, "")
        text, is_package = self._read(f"{path}/__init__.py"), True
        if text is None:
            text, is_package = self._read(f"{path}.py"), False
        if text is None:
            return None
        module = _Module(name, is_package, text)
        try:
            tree = ast.parse(text)
        except SyntaxError:
            # Written for a newer Python than this one, which could not import it either.
            return None
        _fill(module, tree.body)
        return module


def _fill(module: _Module, body: list[ast.stmt]) -> None:
    """Note what the statements of a module define; of alternatives, a definition before an import."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if not isinstance(module.names.get(node.name), (ast.ClassDef, ast.FunctionDef)):
                module.names[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            for item in node.names:
                if item.name == "*":
                    module.stars.append(source)
                else:
                    module.imports.setdefault(item.asname or item.name, (source, item.name))
        elif isinstance(node, ast.Import):
            for item in node.names:
                bound = item.asname or item.name.partition(".")[0]
                module.imports.setdefault(bound, (item.name if item.asname else bound, ""))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for leaf in ast.walk(target):
                    if isinstance(leaf, ast.Name):
                        module.names.setdefault(leaf.id, node.value or node)
        elif isinstance(node, ast.Try):
            _fill(module, [*node.body, *node.orelse])
            for handler in node.handlers:
                _fill(module, handler.body)
        elif isinstance(node, (ast.If, ast.With)):
            _fill(module, [*node.body, *getattr(node, "orelse", [])])


def _absolute(module: _Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = len(parts) - node.level + (1 if module.is_package else 0)
    return ".".join([*parts[:kept], *([node.module] if node.module else [])])


@lru_cache(maxsize=4096)
def _members(klass: ast.ClassDef) -> dict[str, ast.AST]:
    """Return what a class defines itself: methods, names, and what its methods set on the instance."""
    members: dict[str, ast.AST] = {}
    for node in klass.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            members.setdefault(node.name, node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    members.setdefault(target.id, node)
    for inner in ast.walk(klass):
        if not isinstance(inner, ast.Attribute) or not isinstance(inner.ctx, ast.Store):
            continue
        if getattr(inner.value, "id", "") in ("self", "cls"):
            members.setdefault(inner.attr, inner)
    return members


def _is_dataclass(klass: ast.ClassDef) -> bool:
    names = (_last_name(node.func if isinstance(node, ast.Call) else node) for node in klass.decorator_list)
    return "dataclass" in names


def _parameters(arguments: ast.arguments) -> tuple[str, ...]:
    """Return parameters as in a ``def``: ``/``, ``*``, ``*args`` and ``**kwargs`` included."""
    placed = [*arguments.posonlyargs, *arguments.args]
    bare = len(placed) - len(arguments.defaults)
    found = [item.arg + ("=" if index >= bare else "") for index, item in enumerate(placed)]
    if arguments.posonlyargs:
        found.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg is not None:
        found.append("*" + arguments.vararg.arg)
    elif arguments.kwonlyargs:
        found.append("*")
    for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        found.append(item.arg + ("=" if default is not None else ""))
    if arguments.kwarg is not None:
        found.append("**" + arguments.kwarg.arg)
    return tuple(found)


def _digest(text: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a digest of a definition's lines that is the same in every Python."""
    left_out: set[int] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Expr) and isinstance(getattr(inner.value, "value", None), str):
            left_out.update(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1))
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = text.split("\n")
    kept = [
        " ".join(lines[number - 1].split())
        for number in range(first, (node.end_lineno or first) + 1)
        if number not in left_out
    ]
    code = "\n".join(line for line in kept if line and not line.startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def _dotted(node: ast.AST | None) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        parent = _dotted(node.value)
        return f"{parent}.{node.attr}" if parent else ""
    return ""


def _last_name(node: ast.AST) -> str:
    return _dotted(node).rpartition(".")[2]

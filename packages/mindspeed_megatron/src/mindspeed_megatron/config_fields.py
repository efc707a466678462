"""Fields of the configuration classes of the installed megatron-core, read from their source.

Importing the classes would import torch, which the command line and planning do without. The field part of
each class is parsed instead: names, annotations, literal defaults, the option names megatron-core gives some
fields, and the text below each field.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_FILES = {
    "model_parallel_config.py": ("ModelParallelConfig",),
    "transformer/transformer_config.py": ("TransformerConfig", "MLATransformerConfig"),
    "optimizer/optimizer_config.py": ("OptimizerConfig",),
    "distributed/distributed_data_parallel_config.py": ("DistributedDataParallelConfig",),
}
_OPERATORS: dict[type, Any] = {ast.Mult: operator.mul, ast.Add: operator.add, ast.Pow: operator.pow}


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()
"""The default of a field whose default is no literal: a function, an enumeration, a dtype."""


@dataclass(frozen=True)
class ConfigField:
    """One field of a configuration class.

    Attributes:
        owner: the class.
        name: the field.
        annotation: its type, as written, without ``Optional``.
        choices: the values of a ``Literal``.
        default: a literal, or `UNKNOWN`.
        options: option strings megatron-core names for it; mostly none.
        summary: the first sentence of its description.
    """

    owner: str
    name: str
    annotation: str
    choices: tuple[Any, ...]
    default: Any
    options: tuple[str, ...]
    summary: str


@cache
def config_fields() -> tuple[ConfigField, ...]:
    """Return every field of megatron-core's configuration classes; none where it is not installed."""
    root = _megatron_core()
    return () if root is None else tuple(_fields(root))


def _megatron_core() -> Path | None:
    # Asked for the sub-package, find_spec would import the package around it.
    found = find_spec("megatron")
    places = (found.submodule_search_locations or ()) if found is not None else ()
    return next((root for place in places if (root := Path(place) / "core").is_dir()), None)


def _fields(root: Path) -> Iterator[ConfigField]:
    for file, classes in _FILES.items():
        try:
            source = (root / file).read_text(encoding="utf-8")
        except OSError:
            continue
        for name in classes:
            fields = _field_part(source, name)
            definition = ast.parse(fields).body[0] if fields else None
            if isinstance(definition, ast.ClassDef):
                yield from _class_fields(name, definition.body)


def _field_part(source: str, name: str) -> str:
    """Cut a class before its first method: methods are most of these files and of the time to parse them."""
    start = re.search(rf"^class {name}\b", source, re.M)
    if start is None:
        return ""
    ends = (source.find(mark, start.end()) for mark in ("\n    def ", "\n    @", "\n@", "\nclass "))
    return source[start.start() : min((end for end in ends if end >= 0), default=len(source))]


def _class_fields(owner: str, body: list[ast.stmt]) -> Iterator[ConfigField]:
    for statement, after in zip(body, [*body[1:], ast.Pass()]):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        default, options = _default(statement.value)
        annotation, choices = _annotation(statement.annotation)
        text = after.value.value if _is_text(after) else ""  # type: ignore[attr-defined]
        yield ConfigField(
            owner, statement.target.id, annotation, choices, default, options, _first_sentence(text)
        )


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _first_sentence(text: str) -> str:
    flat = " ".join(text.split())
    sentence = re.split(r"(?<=[a-z0-9)\]`'\"])\.(?= |$)", flat, maxsplit=1)[0]
    return sentence if len(sentence) <= 200 else sentence[:197].rsplit(" ", 1)[0] + " ..."


def _annotation(node: ast.expr) -> tuple[str, tuple[Any, ...]]:
    if isinstance(node, ast.Subscript):
        outer = ast.unparse(node.value).rsplit(".", 1)[-1]
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer == "Optional":
            return _annotation(inner[0])
        if outer == "Literal":
            values = tuple(item.value for item in inner if isinstance(item, ast.Constant))
            return type(values[0]).__name__, values
    return ast.unparse(node).replace("List[", "list[").replace("Tuple[", "tuple["), ()


def _default(node: ast.expr | None) -> tuple[Any, tuple[str, ...]]:
    """Return the literal default, and the option names in the metadata of ``field(...)``."""
    if not isinstance(node, ast.Call):
        return _literal(node), ()
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    default = _literal(keywords["default"]) if "default" in keywords else UNKNOWN
    metadata = _literal(keywords.get("metadata"))
    options = metadata.get("argparse_meta", {}).get("arg_names", ()) if isinstance(metadata, dict) else ()
    return default, tuple(options)


def _literal(node: ast.expr | None) -> Any:
    if node is None:
        return UNKNOWN
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _literal(node.left), _literal(node.right)
        if all(isinstance(side, (int, float)) for side in (left, right)):
            return _OPERATORS[type(node.op)](left, right)
        return UNKNOWN
    try:
        return ast.literal_eval(node)
    except ValueError:
        return UNKNOWN

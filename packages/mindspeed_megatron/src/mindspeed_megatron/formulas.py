"""Closed formulas of features: expressions over argument names, evaluated without executing code.

A feature states them as text (`Feature.formulas`), so that a declaration stays cheap; tools fill in the
arguments of a run. ``element_size`` stands for the bytes of a parameter and of an activation.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError

if TYPE_CHECKING:
    from mindspeed_core.feature import Feature

ELEMENT_SIZE = "element_size"
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def formula_of(feature: type[Feature], quantity: str, platform: str) -> str:
    """Return the text of a formula: that of the platform (``activation_bytes.npu``), or of all; or nothing.

    Args:
        feature: the declaration.
        quantity: ``activation_bytes`` for instance.
        platform: name of the platform that is planned.
    """
    return feature.formulas.get(f"{quantity}.{platform}", feature.formulas.get(quantity, ""))


def evaluate(text: str, values: Mapping[str, Any]) -> float:
    """Return the value of a formula.

    Args:
        text: sums, products and quotients of numbers and names, with ``x if condition else y``, where a
            condition is a name, or a name that equals something.
        values: the arguments of a run, and `ELEMENT_SIZE`.

    Raises:
        UserError: it is no such expression, or uses a name without a number.
    """
    return float(_value(parsed(text), text, values))


def parsed(text: str) -> ast.expr:
    """Return the tree of a formula.

    Raises:
        UserError: it is no expression.
    """
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise UserError(f"formula {text!r} is no expression: {error.msg}") from None


def _value(node: ast.expr, text: str, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.Name):
        found = values.get(node.id)
        if not isinstance(found, (int, float)):
            raise UserError(f"formula {text!r}: {node.id} is {found!r}, which is no number")
        return found
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](*(_value(part, text, values) for part in (node.left, node.right)))
    if isinstance(node, ast.IfExp):
        return _value(node.body if _holds(node.test, text, values) else node.orelse, text, values)
    raise UserError(f"formula {text!r}: {ast.unparse(node)} is no number, name, sum, product or choice")


def _holds(node: ast.expr, text: str, values: Mapping[str, Any]) -> bool:
    if isinstance(node, ast.Name):
        return bool(values.get(node.id))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
        name, other = node.left, node.comparators[0]
        if isinstance(name, ast.Name) and isinstance(other, ast.Constant):
            return bool(values.get(name.id) == other.value)
    raise UserError(f"formula {text!r}: {ast.unparse(node)} is no name, nor a name that equals something")

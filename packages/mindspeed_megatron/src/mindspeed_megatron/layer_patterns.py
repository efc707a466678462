"""Values of flags that say something per layer: a number, or a list such as ``([0]*3+[1])*2``.

Megatron-LM evaluates such a text as Python. Here only lists of whole numbers, ``+``, ``*`` and parentheses
mean something, and everything else is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

_LONGEST = 100_000


def layer_pattern(text: str) -> int | list[int]:
    """Read a frequency ``N`` or a list expression.

    Raises:
        ValueError: the text is neither.
    """
    if re.fullmatch(r"\s*\d+\s*", text):
        return int(text)
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is neither a number nor a list such as ([0]*3+[1])*2") from error
    if not isinstance(value, list):
        raise ValueError(f"{text!r} is neither a number nor a list such as ([0]*3+[1])*2")
    return value


def window(text: str) -> tuple[int, int]:
    """Read ``127,0`` or ``(127,0)``: tokens to the left and to the right, -1 for all of them.

    Raises:
        ValueError: the text is no such pair.
    """
    found = re.fullmatch(r"\s*\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?\s*", text)
    if found is None:
        raise ValueError(f"{text!r} is no pair of numbers such as 127,0")
    return int(found[1]), int(found[2])


_OF_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "moe_layer_freq": lambda index, every: index % every == 0,
    "window_attn_skip_freq": lambda index, every: (index + 1) % every != 0,
    "no_rope_freq": lambda index, every: (index + 1) % every == 0,
    "linear_attention_freq": lambda index, every: (index + 1) % every != 0,
}
"""By field, whether a layer counted from 0 is chosen by a number: megatron-core's rules."""
PATTERNS = tuple(_OF_NUMBERS)
"""The fields that choose layers by a number, or by a list with an entry for each."""


def spelled_out(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that choose layers, with numbers written as lists.

    Args:
        fields: of a ``TransformerConfig``, by name; ``num_layers`` among them.
    """
    layers = fields.get("num_layers")
    found: dict[str, Any] = {}
    for name, chosen in _OF_NUMBERS.items():
        every = fields.get(name)
        if isinstance(layers, int) and isinstance(every, int) and every > 0:
            found[name] = [int(chosen(index, every)) for index in range(layers)]
    return found


def _value(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_number(item) for item in node.elts]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            return _repeated(left, right) if isinstance(left, list) else _repeated(right, left)
    raise ValueError("only lists of whole numbers, +, * and parentheses are understood")


def _number(node: ast.expr) -> int:
    value = _value(node)
    if isinstance(value, list):
        raise ValueError("a list of layers holds whole numbers")
    return value


def _repeated(items: Any, times: Any) -> list[int]:
    if len(items) * times > _LONGEST:
        raise ValueError(f"more than {_LONGEST} layers")
    return items * times

"""Layout of a linear layer's input and output on a rank, for modules that go around linear layers.

megatron-core's column and row linears take and give the parts that its documentation says; a module that
adds to their output relies on it. A linear that differs declares a `LinearLayout`, and whoever wraps it has
to know that layout by name. A module that holds another one inside says so with ``wraps``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

LAYOUT, WRAPS, OPAQUE = "linear_layout", "wraps", "opaque"
"""Class attributes of modules: the `LinearLayout` of a linear; the constructor argument that holds the
specification of what a module contains; True where a linear's output is not the product of its input with its
weight, so that nobody may compute the product, or the weight's gradient, in its place."""
ANY_LAYOUT: Final = frozenset({"*"})
"""Of a wrapper that hands input and output on as they are, and adds nothing that has their shape."""


@dataclass(frozen=True)
class LinearLayout:
    """Parts of a linear's input and output that a rank has, where they are not megatron-core's.

    Attributes:
        name: by which wrappers say that they know it; the name of the feature.
        input: shape of the input on a rank, ``"[s / x, b, k / y]"``.
        output: shape of the output on a rank.
    """

    name: str
    input: str
    output: str

    def __str__(self) -> str:
        """Return it for a message."""
        return f"takes {self.input} and gives {self.output}"


def layout_of(module: Any) -> LinearLayout | None:
    """Return the layout that a linear's class declares; None for megatron-core's."""
    return getattr(module, LAYOUT, None)


def is_opaque(linear: Any) -> bool:
    """Return whether a linear, or its class, says that its output is not the product with its weight."""
    return bool(getattr(linear, OPAQUE, False))


def wrapped_argument(module: Any) -> str:
    """Return the constructor argument of a class that holds what it contains; empty where it says none."""
    return getattr(module, WRAPS, "") if isinstance(module, type) else ""


def knows(layouts: Collection[str], layout: LinearLayout | None) -> bool:
    """Return whether a wrapper that names ``layouts`` works around a linear of a layout."""
    return layout is None or layouts == ANY_LAYOUT or layout.name in layouts

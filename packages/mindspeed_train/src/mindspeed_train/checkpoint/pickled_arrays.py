"""Arrays and numbers of NumPy in pickles of checkpoints, made without NumPy's own constructors."""

from __future__ import annotations

import io
from typing import Any, NoReturn

import numpy as np

from mindspeed_train.checkpoint.inert_pickle import Values
from mindspeed_train.checkpoint.pickle_nodes import Made, PickleError

_NUMPY = {
    f"{kind}{size}" for kind, sizes in (("i", "1248"), ("u", "1248"), ("f", "248")) for size in sizes
} | {"b1", "c8", "c16"}
_MAX_DIMENSIONS = 16


def refuse(made: Made) -> NoReturn:
    """Refuse an object that is not made as the library makes it."""
    raise PickleError(f"a {made.name} that is not made as usual")


def integers(values: Values, node: Any) -> tuple[int, ...]:
    """Return a tuple of integers, a shape or a stride, of at most as many as torch has dimensions."""
    nodes = values.sequence(node)
    if len(nodes) > _MAX_DIMENSIONS:
        raise PickleError(f"{len(nodes)} dimensions")
    return tuple(values.integer(each) for each in nodes)


def shape_of(values: Values, node: Any) -> tuple[int, ...]:
    """Return the sizes or offsets that a ``torch.Size``, a tuple or a list holds."""
    return integers(values, node)


def _array_type(values: Values, node: Any) -> np.dtype:
    made = values.called(node, "dtype")
    first, *_ = values.sequence(made.arguments) or refuse(made)
    name = values.text(first)
    if name not in _NUMPY:
        raise PickleError(f"numpy's type {name[:40]!r}, which is no number")
    order = "="
    if made.state is not None:
        parts = values.sequence(made.state)
        if len(parts) < 2 or parts[1] not in ("<", ">", "|", "="):
            raise PickleError("numpy's type with an unknown order of bytes")
        order = parts[1]
    return np.dtype(name if order in ("|", "=") else f"{order}{name}")


def _array_of(kind: np.dtype, shape: tuple[int, ...], content: Any, order: str) -> np.ndarray:
    count = 1
    for length in shape:
        count *= length
    if not isinstance(content, bytes) or len(content) != count * kind.itemsize:
        raise PickleError("an array of numbers with more or fewer bytes than its shape needs")
    found = np.frombuffer(content, dtype=kind).reshape(shape, order="F" if order == "F" else "C")
    return found.astype(kind.newbyteorder("="), copy=True)


def array(values: Values, made: Made) -> np.ndarray:
    """Return the array that ``_reconstruct`` and its state describe."""
    if made.state is None:
        refuse(made)
    state = values.sequence(made.state, 5)
    kind, content = _array_type(values, state[2]), values.value(state[4])
    return _array_of(kind, integers(values, state[1]), content, "F" if state[3] is True else "C")


def array_from_buffer(values: Values, made: Made) -> np.ndarray:
    """Return the array of a buffer, as pickles of protocol 5 hold it."""
    content, kind, shape, order = values.sequence(made.arguments, 4)
    found = _array_type(values, kind)
    return _array_of(found, integers(values, shape), values.value(content), values.text(order))


def number(values: Values, made: Made) -> Any:
    """Return a scalar of NumPy as a number of Python."""
    kind, content = values.sequence(made.arguments, 2)
    return _array_of(_array_type(values, kind), (), values.value(content), "C").item()


def buffer(values: Values, made: Made) -> io.BytesIO:
    """Return bytes in memory, as a file."""
    if made.state is None:
        (node,) = values.sequence(made.arguments, 1)
    else:
        node = values.sequence(made.state)[0]
    found = values.value(node)
    if not isinstance(found, bytes):
        refuse(made)
    return io.BytesIO(found)

"""The operations of a pickle, run on nodes of our own: nothing is imported, called, set or hashed."""

from __future__ import annotations

import _compat_pickle
import pickletools
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from mindspeed_core.terminal.foreign_text import shown

_LARGEST = 1 << 128


class PickleError(ValueError):
    """The bytes are no pickle that is read here; the message says why."""


class ForeignNameError(PickleError):
    """A pickle refers to something that is not in the table; the message is its full name."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A list, tuple, set or frozenset under construction."""

    kind: type
    items: list[Any] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Pairs:
    """A dictionary under construction, without hashing its keys."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Name:
    """A reference to a class, function or constant, by full name."""

    full: str


@dataclass(eq=False, slots=True)
class Made:
    """A call of something named, and what was set in the object afterwards."""

    name: str
    arguments: Any
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class External:
    """A reference to something outside the pickle: the bytes of a tensor in an archive."""

    key: Any


def kind_of(node: Any) -> str:
    """Return what a node is, for a message."""
    if isinstance(node, Name):
        return shown(node.full)
    if isinstance(node, Made):
        return f"an object of {shown(node.name)}"
    if isinstance(node, Sequence):
        return f"a {node.kind.__name__}"
    return {Pairs: "a dictionary", External: "a tensor's bytes"}.get(type(node), f"a {type(node).__name__}")


_MARK = object()


class _Machine:
    """The stack and the memo of a pickle that is read."""

    def __init__(self, permitted: Container[str] | None) -> None:
        self._permitted = permitted
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def pop(self) -> Any:
        found = self.stack.pop()
        if found is _MARK:
            raise PickleError("an operation lacks its operand")
        return found

    def marked(self) -> list[Any]:
        """Return what was put on the stack since the last mark."""
        items: list[Any] = []
        while (found := self.stack.pop()) is not _MARK:
            items.append(found)
        items.reverse()
        return items

    def keep(self, number: int) -> None:
        if self.stack[-1] is _MARK:
            raise PickleError("an operation lacks its operand")
        self.memo[number] = self.stack[-1]

    def name(self, module: Any, name: Any) -> Name:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("a name is no text")
        # Old protocols spell the names of Python 2.
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        if self._permitted is not None and ("." in name or full not in self._permitted):
            raise ForeignNameError(full)
        return Name(full)

    def call(self) -> None:
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, Name) or not isinstance(arguments, Sequence) or arguments.kind is not tuple:
            raise PickleError("it calls something that has no name")
        self.stack.append(Made(called.full, arguments))

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if not isinstance(target, Made) or target.state is not None:
            raise PickleError(f"it sets the state of {kind_of(target)}, which is no new object")
        target.state = state

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not (isinstance(target, Made) or (isinstance(target, Sequence) and target.kind in (list, set))):
            raise PickleError("it adds items to what is no list")
        target.items.extend(items)

    def put(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, (Pairs, Made)) or len(items) % 2:
            raise PickleError("it adds keys to what is no dictionary")
        target.pairs.extend(zip(items[::2], items[1::2]))


def parse(content: bytes, permitted: Container[str] | None) -> Any:
    """Run the operations of a pickle; return the node it ends with.

    Args:
        content: the pickle, and nothing after it.
        permitted: the full names that it may refer to; None for all.

    Raises:
        PickleError: it is no pickle, has an operation that none of ours knows, or refers to another name.
        ValueError: it is cut off.
    """
    machine = _Machine(permitted)
    for operation, argument, position in pickletools.genops(content):
        action = _ACTIONS.get(operation.name)
        if action is None:
            raise PickleError(f"it has the operation {operation.name}, which no checkpoint needs")
        action(machine, argument)
        end = (position or 0) + 1
    if end != len(content):
        raise PickleError("something follows the pickle")
    root = machine.pop()
    if machine.stack:
        raise PickleError("it leaves more than one value")
    return root


def _bounded(machine: _Machine, argument: Any) -> None:
    if not -_LARGEST <= argument <= _LARGEST:
        raise PickleError("a number is too large")
    machine.stack.append(argument)


def _push(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


def _constant(value: Any) -> Callable[[_Machine, Any], None]:
    return lambda machine, argument: machine.stack.append(value)


def _new(kind: type) -> Callable[[_Machine, Any], None]:
    return lambda machine, argument: machine.stack.append(Sequence(kind))


def _collect(kind: type) -> Callable[[_Machine, Any], None]:
    return lambda machine, argument: machine.stack.append(Sequence(kind, machine.marked()))


def _tuple(count: int) -> Callable[[_Machine, Any], None]:
    def action(machine: _Machine, argument: Any) -> None:
        items = [machine.pop() for _ in range(count)]
        machine.stack.append(Sequence(tuple, items[::-1]))

    return action


def _named(machine: _Machine, argument: str) -> None:
    module, _, name = argument.partition(" ")
    machine.stack.append(machine.name(module, name))


def _named_on_stack(machine: _Machine, argument: Any) -> None:
    name, module = machine.pop(), machine.pop()
    machine.stack.append(machine.name(module, name))


def _fetch(machine: _Machine, argument: Any) -> None:
    if int(argument) not in machine.memo:
        raise PickleError("it refers to an object that it has not made")
    machine.stack.append(machine.memo[int(argument)])


def _with_pairs(machine: _Machine, argument: Any) -> None:
    items = machine.marked()
    machine.stack.append(Pairs())
    machine.put(items)


def _two(machine: _Machine) -> list[Any]:
    value, key = machine.pop(), machine.pop()
    return [key, value]


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, argument: None),
    **dict.fromkeys(("INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4"), _bounded),
    **dict.fromkeys(("FLOAT", "BINFLOAT"), _push),
    **dict.fromkeys(("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), _push),
    "BYTEARRAY8": lambda machine, argument: machine.stack.append(bytes(argument)),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "MARK": _constant(_MARK),
    "EMPTY_LIST": _new(list),
    "EMPTY_TUPLE": _new(tuple),
    "EMPTY_SET": _new(set),
    "EMPTY_DICT": lambda machine, argument: machine.stack.append(Pairs()),
    "LIST": _collect(list),
    "TUPLE": _collect(tuple),
    "FROZENSET": _collect(frozenset),
    "DICT": _with_pairs,
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "APPEND": lambda machine, argument: machine.append([machine.pop()]),
    "APPENDS": lambda machine, argument: machine.append(machine.marked()),
    "ADDITEMS": lambda machine, argument: machine.append(machine.marked()),
    "SETITEM": lambda machine, argument: machine.put(_two(machine)),
    "SETITEMS": lambda machine, argument: machine.put(machine.marked()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda machine, argument: machine.keep(int(argument))),
    "MEMOIZE": lambda machine, argument: machine.keep(len(machine.memo)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _fetch),
    "GLOBAL": _named,
    "STACK_GLOBAL": _named_on_stack,
    "REDUCE": lambda machine, argument: machine.call(),
    "NEWOBJ": lambda machine, argument: machine.call(),
    "BUILD": lambda machine, argument: machine.build(),
    "BINPERSID": lambda machine, argument: machine.stack.append(External(machine.pop())),
}
"""What each operation of a pickle does here. Those that are missing are refused."""

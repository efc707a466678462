"""Pickles read as data: an interpreter that builds inert records, and imports, calls and sets nothing.

`pickle.Unpickler` runs whatever a file says: it imports, calls, and sets attributes of the objects it made.
Lists of allowed names limit the names, and not what is done with them. Here the operations of a pickle make
nodes of our own; a table of functions then turns the nodes that a caller asks for into values, with checked
types and bounds. Work and result are bounded by the length of the pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mindspeed_core.errors import CheckpointError
from mindspeed_core.terminal.foreign_text import shown
from mindspeed_train.checkpoint.pickle_nodes import (
    External,
    ForeignNameError,
    Made,
    Name,
    Pairs,
    PickleError,
    Sequence,
    kind_of,
    parse,
)

_DEPTH = 50
_SHARE = 64
"""Size of the values, with everything shared counted as often as it is used, in lengths of the pickle."""
_SMALL = 4096


@dataclass(frozen=True)
class Record:
    """A value of a foreign class: its name and what the pickle gave it, without behaviour."""

    name: str
    arguments: Any = ()
    state: Any = None
    content: Any = None


Builder = Callable[["Values", Made], Any]
"""Makes the value of a call."""


@dataclass(frozen=True)
class Table:
    """The names that a pickle may refer to.

    Attributes:
        builders: functions of ours that make a value from arguments and state, by full name.
        constants: values by full name.
    """

    builders: Mapping[str, Builder]
    constants: Mapping[str, Any] = field(default_factory=dict)

    def __contains__(self, name: object) -> bool:
        """Return whether a pickle may refer to that name."""
        return name in self.builders or name in self.constants


class Values:
    """The values of nodes, made when they are asked for.

    Attributes:
        external: makes the value of an `External`.
    """

    def __init__(self, table: Table, budget: int, external: Callable[[Values, External], Any]) -> None:
        """Make nothing yet; all values together may have the size ``budget``."""
        self.external = external
        self._table = table
        self._budget = budget
        self._spent = 0
        self._depth = 0
        self._known: dict[int, tuple[Any, int, Any]] = {}
        self._open: set[int] = set()

    def spend(self, size: int) -> None:
        """Count the size of a value.

        Raises:
            PickleError: the values are larger than the file can describe.
        """
        self._spent += size
        if self._spent > self._budget:
            raise PickleError("its values repeat themselves until they are far larger than the file")

    def value(self, node: Any) -> Any:
        """Return the value of a node.

        Raises:
            PickleError: it contains itself, is nested too deeply, or is not what its class is made of.
        """
        if not isinstance(node, (Sequence, Pairs, Made, External, Name)):
            self.spend(1 + (len(node) >> 3 if isinstance(node, (str, bytes)) else 0))
            return node
        if isinstance(node, Name):
            self.spend(1)
            return self._table.constants.get(node.full, Record(node.full))
        known = self._known.get(id(node))
        if known is not None:
            self.spend(known[1])
            return known[0]
        if id(node) in self._open:
            raise PickleError("an object contains itself")
        if self._depth >= _DEPTH:
            raise PickleError(f"its objects are nested more than {_DEPTH} deep")
        before = self._spent
        self.spend(1)
        self._open.add(id(node))
        self._depth += 1
        made = self._make(node)
        self._depth -= 1
        self._open.discard(id(node))
        # The node is kept too: another at its address would be taken for it.
        self._known[id(node)] = (made, self._spent - before, node)
        return made

    def _make(self, node: Sequence | Pairs | Made | External) -> Any:
        if isinstance(node, Sequence):
            if node.kind in (set, frozenset):
                return node.kind(self.key(item) for item in node.items)
            return node.kind(self.value(item) for item in node.items)
        if isinstance(node, Pairs):
            return self.dictionary(node.pairs)
        if isinstance(node, External):
            return self.external(self, node)
        builder = self._table.builders.get(node.name)
        if builder is not None:
            return builder(self, node)
        return Record(
            node.name,
            self.value(node.arguments),
            self.value(node.state),
            self.dictionary(node.pairs) if node.pairs else [self.value(item) for item in node.items],
        )

    def dictionary(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return a dictionary of keys that are cheap to compare."""
        return {self.key(name): self.value(item) for name, item in pairs}

    def key(self, node: Any) -> Any:
        """Return a key: text, a number, bytes, nothing, or a short tuple of them."""
        if isinstance(node, Sequence) and node.kind is tuple and len(node.items) <= 16:
            return tuple(self._scalar(item) for item in node.items)
        return self._scalar(node)

    def _scalar(self, node: Any) -> Any:
        self.spend(1)
        if isinstance(node, Name):
            found = self._table.constants.get(node.full)
            return node.full if found is None else found
        if not isinstance(node, (str, bytes, int, float, type(None))):
            raise PickleError(f"{kind_of(node)} as a key")
        return node

    def text(self, node: Any) -> str:
        """Return a node that has to be text."""
        if not isinstance(node, str):
            raise PickleError(f"{kind_of(node)} where a text belongs")
        self.spend(1 + (len(node) >> 3))
        return node

    def integer(self, node: Any, *, low: int = 0, high: int = 1 << 62) -> int:
        """Return a node that has to be an integer within bounds."""
        if type(node) is not int:
            raise PickleError(f"{kind_of(node)} where an integer belongs")
        if not low <= node <= high:
            raise PickleError(f"the number {node} where one from {low} to {high} belongs")
        self.spend(1)
        return node

    def sequence(self, node: Any, length: int | None = None) -> list[Any]:
        """Return the nodes of a list or a tuple, of a length if one is given."""
        if isinstance(node, Made) and node.name == "torch.Size":
            (node,) = self.sequence(node.arguments, 1)
        if not isinstance(node, Sequence) or node.kind not in (list, tuple):
            raise PickleError(f"{kind_of(node)} where a list belongs")
        if length is not None and len(node.items) != length:
            raise PickleError(f"{len(node.items)} values where {length} belong")
        self.spend(1 + len(node.items))
        return node.items

    def pairs(self, node: Any) -> list[tuple[Any, Any]]:
        """Return keys and values of a dictionary, as nodes."""
        if not isinstance(node, Pairs):
            raise PickleError(f"{kind_of(node)} where a dictionary belongs")
        self.spend(1 + 2 * len(node.pairs))
        return node.pairs

    def fields(self, node: Any) -> dict[str, Any]:
        """Return the nodes of a dictionary with text as keys, as objects have it as their state."""
        return {self.text(name): item for name, item in self.pairs(node)}

    def called(self, node: Any, name: str) -> Made:
        """Return a node that has to be an object of a class."""
        if not isinstance(node, Made) or node.name.rpartition(".")[2] != name:
            raise PickleError(f"{kind_of(node)} where a {name} belongs")
        self.spend(1)
        return node


def read_pickle(
    content: bytes,
    where: str,
    table: Table,
    *,
    external: Callable[[Values, External], Any] | None = None,
    size: int = 0,
    trusted: bool = False,
) -> Any:
    """Return the value that a pickle describes.

    Args:
        content: the pickle, and nothing after it.
        where: the file and what is inside it, for messages.
        table: the names that it may refer to.
        external: makes values of what lies outside the pickle; by default that is refused.
        size: bytes that lie outside it.
        trusted: take other names too, as `Record`; nothing of theirs is imported.

    Raises:
        CheckpointError: it refers to another name, or is not what its classes are made of.
    """
    try:
        root = parse(content, None if trusted else table)
        budget = _SHARE * len(content) + size + _SMALL
        return Values(table, budget, external or _refuse_external).value(root)
    except ForeignNameError as error:
        raise CheckpointError(
            f"{where}: refers to {shown(str(error))}, which no checkpoint needs; loading it could run "
            "foreign code. If you trust where it comes from, --trust-checkpoint reads it as a record"
        ) from error
    except (ValueError, TypeError, IndexError, ArithmeticError, MemoryError, RecursionError) as error:
        kind = "" if isinstance(error, PickleError) else f"{type(error).__name__}: "
        first = shown((str(error).splitlines() or [""])[0])
        raise CheckpointError(
            f"{where}: cannot be read ({kind}{first}); the file is damaged or forged; choose another "
            "checkpoint with --ckpt-step"
        ) from error


def _refuse_external(values: Values, node: External) -> NoReturn:
    raise PickleError("it refers to bytes outside of it")

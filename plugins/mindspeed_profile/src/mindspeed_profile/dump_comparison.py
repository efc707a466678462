"""Two dumps compared: the first module whose results differ, whatever tensor parallelism each run had.

Where both runs have one layout every rank is compared with itself. Where the sizes of tensor parallelism
differ, a tensor whose elements are spread over the ranks is put together (least, largest, norm, numbers of
NaN) and one that every rank has whole is taken once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_profile.dump_files import RankDump

Entry = Mapping[str, Any]
Key = tuple[int, int, int, str, int, int, int]
"""Step, micro-batch or call, forward (0) or backward (1), module, tensor, data and context parallel rank."""
_SAME_SIZE = {"dp": "data-parallel", "cp": "context-parallel"}


@dataclass(frozen=True)
class Difference:
    """A tensor that differs.

    Attributes:
        step: counted from 0.
        call: which call of the module in the step, from 0: the micro-batch, for most modules.
        direction: ``"forward"``, or ``"backward"`` for the gradient of what the module returned.
        module: its name, layers counted from 0 in the whole model.
        tensor: which of the tensors that it returned.
        where: ranks that differ: ``"tensor-parallel rank 1"``.
        changes: the numbers that differ, ``"nan 0 -> 64"``.
    """

    step: int
    call: int
    direction: str
    module: str
    tensor: int
    where: str
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """The result.

    Attributes:
        first: the first difference in the order of the first dump; None without any.
        compared: tensors that both have.
        equal: those among them with equal bytes on every rank.
        differing: those among them that differ.
        missing: modules that one of them has in the steps of both, and the other has not.
    """

    first: Difference | None
    compared: int
    equal: int
    differing: int
    missing: tuple[str, ...]


def compare_dumps(a: Sequence[RankDump], b: Sequence[RankDump], tolerance: float) -> Comparison:
    """Compare two dumps.

    Args:
        a: of one run.
        b: of the other.
        tolerance: relative distance of least, largest and norm that counts as the same.

    Raises:
        UserError: the dumps have no step in common, or lie differently over data or context parallelism.
    """
    for name, words in _SAME_SIZE.items():
        sizes = [ranks[0].place(name)[1] for ranks in (a, b)]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"the dumps have {words} sizes {sizes[0]} and {sizes[1]}: their ranks hold other samples; "
                "dump runs of one size"
            )
    left, right = _by_key(a), _by_key(b)
    steps = {key[0] for key in left} & {key[0] for key in right}
    if not steps:
        raise UserError("the dumps have no step in common")
    order = sorted((key for key in left if key in right), key=lambda key: left[key][0])
    found: list[Difference] = []
    equal = 0
    for key in order:
        mine, others = left[key][1], right[key][1]
        if _bits(mine) == _bits(others):
            equal += 1
            continue
        difference = _difference(key, mine, others, tolerance)
        if difference is not None:
            found.append(difference)
    modules = [{key[3] for key in one if key[0] in steps} for one in (left, right)]
    missing = tuple(sorted(modules[0] ^ modules[1]))
    return Comparison(found[0] if found else None, len(order), equal, len(found), missing)


def _by_key(ranks: Iterable[RankDump]) -> dict[Key, tuple[tuple[int, ...], dict[int, Entry]]]:
    """Return for each tensor its place in the order of the run, and its entries by tensor-parallel rank."""
    found: dict[Key, tuple[tuple[int, ...], dict[int, Entry]]] = {}
    for rank in ranks:
        stage = rank.place("pp")[0]
        for position, entry in enumerate(rank.entries):
            backward = int(entry["pass"] == "backward")
            key: Key = (
                entry["step"],
                entry["call"],
                backward,
                entry["module"],
                entry["tensor"],
                rank.place("dp")[0],
                rank.place("cp")[0],
            )
            order = (entry["step"], entry["call"], backward, -stage if backward else stage, position)
            known = found.get(key)
            if known is None:
                found[key] = (order, {rank.place("tp")[0]: entry})
            else:
                known[1].setdefault(rank.place("tp")[0], entry)
    return found


def _bits(entries: Mapping[int, Entry]) -> tuple[Any, ...]:
    return tuple((rank, *entries[rank]["shape"], entries[rank]["crc32"]) for rank in sorted(entries))


def _difference(
    key: Key, a: Mapping[int, Entry], b: Mapping[int, Entry], tolerance: float
) -> Difference | None:
    step, call, backward, module, tensor, dp, cp = key
    where: list[str] = []
    changes: tuple[str, ...] = ()
    if a.keys() == b.keys():
        for rank in sorted(a):
            changed = _changes(a[rank], b[rank], tolerance)
            if changed:
                where.append(f"tensor-parallel rank {rank}" if len(a) > 1 else "")
                changes = changes or changed
    else:
        changes = _changes(*_put_together(a, b), tolerance)
        where.append("tensor-parallel ranks together")
    if not changes:
        return None
    ranks = [*filter(None, where)]
    ranks += [
        f"{words} rank {rank}" for words, rank in (("data-parallel", dp), ("context-parallel", cp)) if rank
    ]
    return Difference(
        step, call, "backward" if backward else "forward", module, tensor, ", ".join(ranks), changes
    )


def _put_together(a: Mapping[int, Entry], b: Mapping[int, Entry]) -> tuple[Entry, Entry]:
    """Return one entry for each side: of whole tensors, put together where ranks hold parts."""
    first, second = a[min(a)], b[min(b)]
    if _elements(first) == _elements(second):
        # Every rank has it whole.
        return first, second
    return _joined(a), _joined(b)


def _joined(entries: Mapping[int, Entry]) -> Entry:
    parts = list(entries.values())
    known = [part for part in parts if part["l2"] is not None]
    total = sum(_elements(part) for part in parts)
    return {
        "shape": [total],
        "nan": sum(part["nan"] for part in parts),
        "inf": sum(part["inf"] for part in parts),
        "min": min((part["min"] for part in known), default=None),
        "max": max((part["max"] for part in known), default=None),
        "l2": math.sqrt(sum(part["l2"] ** 2 for part in known)) if known else None,
    }


def _elements(entry: Entry) -> int:
    return math.prod(entry["shape"])


def _changes(a: Entry, b: Entry, tolerance: float) -> tuple[str, ...]:
    """Return the numbers that differ, in words."""
    found = [f"{name} {a[name]} -> {b[name]}" for name in ("nan", "inf") if a[name] != b[name]]
    if _elements(a) != _elements(b):
        return (*found, f"elements {_elements(a)} -> {_elements(b)}")
    largest = max(
        (abs(one[name]) for one in (a, b) for name in ("min", "max") if one[name] is not None), default=0.0
    )
    for name, scale in (("l2", _largest(a["l2"], b["l2"])), ("min", largest), ("max", largest)):
        one, other = a[name], b[name]
        if (one is None) != (other is None) or (one is not None and abs(one - other) > tolerance * scale):
            found.append(f"{name} {_shown(one)} -> {_shown(other)}")
    return tuple(found)


def _largest(*values: float | None) -> float:
    return max((abs(value) for value in values if value is not None), default=0.0)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"

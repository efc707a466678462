"""The record of all pairs of memory features on the lagging device: trains what is missing, writes the table.

``python tests/combinations/memory_matrix.py`` goes on where it was ended; with ``--table`` it trains nothing.
The record is ``memory_matrix.json`` beside it, the table stands in docs/late-devices.md.

Features are trained in sets that cover all pairs of which both are active. A set counts where its bits are
those of the layout and every feature in it acted; otherwise its pairs are trained one by one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from memory_pairs import (
    EQUAL,
    LAYOUTS,
    REFUSED,
    STANDS_DOWN,
    Together,
    features_of,
    pairs_of,
    untrained,
    verdicts,
)

RECORD = Path(__file__).with_name("memory_matrix.json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "late-devices.md"
KINDS = ("equal", "refused", "one stands down", "wrong")
_HEAD = "| layout | pairs | equal | refused | one stands down |"
_BATCH = 8

Pair = tuple[str, str]
Record = dict[str, dict[str, Any]]
"""By layout: ``sets`` of features that trained the same bits together; by first and second name of a pair
``refused`` with the code of the reason, ``one stands down`` with its name, ``wrong`` with what was seen."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what the record lacks, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", action="append", choices=[*LAYOUTS], help="only this, may be repeated")
    parser.add_argument("--again", action="store_true", help="forget what is recorded of these layouts")
    parser.add_argument("--table", action="store_true", help="write the table, train nothing")
    options = parser.parse_args(arguments)
    record = read()
    for layout in () if options.table else options.layout or LAYOUTS:
        if options.again:
            record.pop(layout, None)
        complete(layout, record)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_table(page, table(record)), encoding="utf-8")
    return int(any(counts(found)["wrong"] for found in record.values()))


def read() -> Record:
    """Return what is recorded."""
    found: Record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return found


def write(record: Record) -> None:
    """Write the record, one set or first name a line."""
    layouts = []
    for layout in filter(record.get, LAYOUTS):
        kinds = []
        for kind, found in record[layout].items():
            items = found.items() if isinstance(found, dict) else ((None, one) for one in found)
            rows = [
                (f"{json.dumps(key)}: " if key is not None else "") + json.dumps(value)
                for key, value in items
            ]
            left, right = "{}" if isinstance(found, dict) else "[]"
            inside = "\n   " + ",\n   ".join(rows) + "\n  " if rows else ""
            kinds.append(f'  "{kind}": {left}{inside}{right}')
        layouts.append(f" {json.dumps(layout)}: {{\n" + ",\n".join(kinds) + "\n }")
    RECORD.write_text("{\n" + ",\n".join(layouts) + "\n}\n", encoding="utf-8")


def complete(layout: str, record: Record) -> None:
    """Judge the pairs of a layout that are not recorded yet; what was wrong is tried again."""
    found = record.setdefault(layout, {})
    found.update({"sets": [], "refused": {}, "one stands down": {}, **found, "wrong": {}})
    known = judged(found)
    active = {pair for pair, kind in known.items() if kind == "equal"}
    for pair in pairs_of(layout):
        names = _pair(pair.names)
        if names in known:
            continue
        reason = untrained(pair)
        if reason:
            _note(found, names, reason)
        else:
            active.add(names)
    write(record)
    left = active - {pair for pair, kind in known.items() if kind == "equal"}
    sets = list(covering(layout, active, left))
    _say(f"{layout}: {len(left)} pairs to train in {len(sets)} sets")
    for batch in _batches(sets):
        for together, verdict in _trained(batch).items():
            if verdict == EQUAL:
                found["sets"].append(list(together.names))
            else:
                _say(f"{together}: {verdict}")
        write(record)
        _say(f"{layout}: {counts(found)}")
    alone = [Together(layout, pair) for pair in sorted(left - judged(found).keys())]
    for batch in _batches(alone):
        for together, verdict in _trained(batch).items():
            _note(found, _pair(together.names), verdict)
        write(record)
        _say(f"{layout}: {counts(found)}")


def covering(
    layout: str,
    active: set[Pair],
    left: set[Pair],
    accepted: Callable[[Together], bool] = lambda together: not untrained(together),
) -> Iterator[Together]:
    """Yield sets of features that cover pairs.

    Args:
        layout: a name of `LAYOUTS`.
        active: the pairs of which both features are active.
        left: those of them that are to be covered.
        accepted: whether a set can be trained.
    """
    order = {name: place for place, name in enumerate(features_of(layout))}
    left = set(left)
    while left:
        names: list[str] = list(min(left, key=lambda pair: [order[name] for name in pair]))
        rejected: set[str] = set()
        while True:
            gains = {
                name: sum(_ordered(name, other, order) in left for other in names)
                for name in order
                if name not in rejected
                and all(name != other and _ordered(name, other, order) in active for other in names)
            }
            best = max(gains, key=lambda name: gains[name], default="")
            if not gains.get(best):
                break
            grown = sorted((*names, best), key=order.__getitem__)
            if accepted(Together(layout, tuple(grown))):
                names = grown
            else:
                rejected.add(best)
        left -= set(combinations(names, 2))
        yield Together(layout, tuple(names))


def judged(found: dict[str, Any]) -> dict[Pair, str]:
    """Return the kind of each recorded pair of a layout."""
    kinds = {
        (first, second): kind
        for kind in KINDS[1:]
        for first, others in found.get(kind, {}).items()
        for second in others
    }
    proved = (pair for names in found.get("sets", ()) for pair in combinations(names, 2))
    return {**kinds, **dict.fromkeys(proved, "equal")}


def counts(found: dict[str, Any]) -> dict[str, int]:
    """Return how many pairs of a layout are of each kind."""
    kinds = list(judged(found).values())
    return {kind: kinds.count(kind) for kind in KINDS}


def table(record: Record) -> list[str]:
    """Return the lines of the table of counts by layout."""
    rows = [[layout, *_row(counts(record[layout]))] for layout in LAYOUTS if layout in record]
    rows.append(["all", *(sum(row[column] for row in rows) for column in range(1, 5))])
    return [_HEAD, "|---|---|---|---|---|", *("| " + " | ".join(map(str, row)) + " |" for row in rows)]


def with_table(page: str, lines: Iterable[str]) -> str:
    """Return a page with these lines in the place of its table of counts."""
    before, _, behind = page.partition(_HEAD)
    return before + "\n".join(lines) + "\n" + behind[behind.index("\n\n") + 1 :]


def _row(found: dict[str, int]) -> list[int]:
    return [sum(found.values()), *(found[kind] for kind in KINDS[:3])]


def _note(found: dict[str, Any], pair: Pair, verdict: str) -> None:
    """Record what was found of a pair, a reason of the resolver by the codes of its problems."""
    if verdict == EQUAL:
        found["sets"].append(list(pair))
        return
    if verdict.startswith(STANDS_DOWN):
        kind, shown = "one stands down", verdict.removeprefix(STANDS_DOWN)
    elif verdict.startswith(REFUSED):
        kind, text = "refused", verdict.removeprefix(REFUSED)
        codes = dict.fromkeys(word for word in text.split() if word.startswith("E-"))
        shown = " ".join(codes) or text.partition("\n")[0]
    else:
        kind, shown = "wrong", verdict
    found[kind].setdefault(pair[0], {})[pair[1]] = shown


def _trained(batch: Sequence[Together]) -> dict[Together, str]:
    """Train sets in one world; where one ended it, or was wrong, each that was is trained again alone."""
    found = verdicts(batch)
    expected = (EQUAL, REFUSED, STANDS_DOWN)
    wrong = [one for one, verdict in found.items() if not verdict.startswith(expected)]
    if len(batch) > 1:
        for one in wrong:
            found |= verdicts([one])
    return found


def _batches(sets: Sequence[Together]) -> Iterator[Sequence[Together]]:
    # Those with the same side without features share its training.
    ordered = sorted(sets, key=lambda one: (one.steps, one.base))
    for begin in range(0, len(ordered), _BATCH):
        yield ordered[begin : begin + _BATCH]


def _pair(names: Sequence[str]) -> Pair:
    first, second = names
    return first, second


def _ordered(one: str, other: str, order: dict[str, int]) -> Pair:
    return (one, other) if order[one] < order[other] else (other, one)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

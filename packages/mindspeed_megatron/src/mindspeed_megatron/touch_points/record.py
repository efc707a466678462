"""Recorded touch points: uses of ours, and what each megatron-core that was read has for them.

``python tools/touch_points.py`` writes the files. They are read where a version is unknown, or asked about.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mindspeed_megatron.touch_points.sources import CLASS, Symbol
from mindspeed_megatron.touch_points.uses import CallShape, Use

FOLDER = Path(__file__).resolve().parent
USES = FOLDER / "uses.json"
VERSIONS = FOLDER / "versions"
INDEX = FOLDER / "index.json"

Symbols = Callable[[str], "Symbol | None"]


@dataclass(frozen=True)
class KnownVersion:
    """Record of a version at the touch points."""

    version: str
    symbols: Mapping[str, Symbol]


@lru_cache(maxsize=1)
def index() -> dict[str, str]:
    """Map the versions of megatron-core that were read, oldest first, to the record of each.

    Versions with equal facts share the record of the first of them.
    """
    if not INDEX.is_file():
        return {}
    found: dict[str, str] = json.loads(INDEX.read_text(encoding="utf-8"))
    return found


def nearest(version: str) -> str:
    """Return the recorded version to compare another one with.

    That is the closest of the same minor version, or else the newest that is older, or else the oldest.

    Raises:
        packaging.version.InvalidVersion: it is no version.
    """
    from packaging.version import Version

    wanted, known = Version(version), list(map(Version, index()))
    same = [name for name in known if name.release[:2] == wanted.release[:2]]
    older = [name for name in same or known if name <= wanted]
    return str(older[-1] if older else (same or known)[0])


def known_version(version: str) -> KnownVersion:
    """Read the record of a version that is in the index."""
    return KnownVersion(version, _symbols(index()[version]))


@lru_cache(maxsize=4)
def _symbols(record: str) -> dict[str, Symbol]:
    found = json.loads((VERSIONS / f"{record}.json").read_text(encoding="utf-8"))
    return {point: _symbol(facts) for point, facts in found["points"].items()}


@lru_cache(maxsize=1)
def known_uses() -> tuple[frozenset[str], dict[str, Use]]:
    """Return the import packages whose uses are recorded, and the uses."""
    found = json.loads(USES.read_text(encoding="utf-8"))
    return frozenset(found["packages"]), {point: _use(facts) for point, facts in found["points"].items()}


def write_uses(packages: Iterable[str], uses: Mapping[str, Use]) -> None:
    """Write the uses, one point a line."""
    _write(USES, {"packages": sorted(packages)}, {point: _of_use(use) for point, use in uses.items()})


def write_versions(uses: Mapping[str, Use], versions: Mapping[str, Symbols]) -> None:
    """Write what versions have for the points in use, one point a line; what a version lacks is left out.

    Records of other versions go.
    """
    from packaging.version import Version

    records: dict[str, tuple[str, dict[str, Any]]] = {}
    listed: dict[str, str] = {}
    for version in sorted(versions, key=Version):
        found = ((point, use, versions[version](point)) for point, use in uses.items())
        points = {point: _of_symbol(symbol, use) for point, use, symbol in found if symbol is not None}
        first, _ = records.setdefault(json.dumps(points, sort_keys=True), (version, points))
        listed[version] = first
    VERSIONS.mkdir(exist_ok=True)
    for path in VERSIONS.glob("*.json"):
        path.unlink()
    for version, points in records.values():
        _write(VERSIONS / f"{version}.json", {}, points)
    INDEX.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    index.cache_clear()
    _symbols.cache_clear()


def _write(path: Path, head: Mapping[str, Any], points: Mapping[str, Any]) -> None:
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    rows = [f"    {json.dumps(point)}: {json.dumps(points[point])}" for point in sorted(points)]
    text = "\n".join(["{", *lines, '  "points": {', ",\n".join(rows), "  }", "}", ""])
    path.write_text(text, encoding="utf-8")


def _of_use(use: Use) -> dict[str, Any]:
    facts: dict[str, Any] = {"by": sorted(use.modules)}
    if use.calls:
        facts["calls"] = [
            [call.positional, *call.keywords, *([] if call.exact else ["..."])] for call in sorted(use.calls)
        ]
    if use.replaced:
        facts["replaced"] = sorted(use.replaced)
    if use.optional:
        facts["optional"] = True
    return facts


def _use(facts: Mapping[str, Any]) -> Use:
    calls = {
        CallShape(call[0], tuple(name for name in call[1:] if name != "..."), "..." not in call)
        for call in facts.get("calls", ())
    }
    return Use(set(facts["by"]), calls, set(facts.get("replaced", ())), facts.get("optional", False))


def _of_symbol(symbol: Symbol, use: Use) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": symbol.kind}
    if symbol.parameters is not None and (use.calls or use.replaced):
        facts["parameters"] = " ".join(symbol.parameters)
    if symbol.fields:
        facts["fields"] = " ".join(symbol.fields)
    if symbol.digest and use.replaced and symbol.kind != CLASS:
        facts["digest"] = symbol.digest
    if symbol.is_method:
        facts["method"] = True
    return facts


def _symbol(facts: Mapping[str, Any]) -> Symbol:
    parameters = tuple(facts["parameters"].split()) if "parameters" in facts else None
    fields = tuple(facts.get("fields", "").split())
    return Symbol(facts["kind"], parameters, fields, facts.get("digest", ""), facts.get("method", False))

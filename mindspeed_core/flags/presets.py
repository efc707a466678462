"""Values that features fill in where the user gave none: presets, and other defaults of adopted flags."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import Feature
from mindspeed_core.flags.entries import FlagEntry
from mindspeed_core.resolver.plan import HeldBack, Problem
from mindspeed_core.resolver.request import asking_flag, failure, ways_out

if TYPE_CHECKING:
    from mindspeed_core.registry import FeatureRecord

DEFAULT = "default"
"""Provenance of a value that nobody gave."""


def apply_presets(
    records: Sequence[FeatureRecord],
    args: Namespace,
    provenance: dict[str, str],
    problems: list[Problem],
    entries: Sequence[FlagEntry],
) -> list[HeldBack]:
    """Let features fill in what nobody gave: change ``args`` and ``provenance``, add to ``problems``.

    Args:
        records: the features.
        args: the arguments so far.
        provenance: where each of them came from.
        problems: what is wrong with what is asked for.
        entries: the flags there are.

    Returns:
        Features that nobody asked for and whose presets fail.
    """
    left_out: list[HeldBack] = []
    for record in with_presets(records, args):
        feature = record.cls
        try:
            preset = dict(feature.presets(args))
            unknown = ", ".join(repr(dest) for dest in preset if dest not in provenance)
            wrong = f"it presets {unknown}, which no flag defines" if unknown else ""
        except (Exception, SystemExit) as error:
            wrong = failure(record, "presets()", error)
        if wrong:
            flag = asking_flag(feature, args, provenance)
            remedy = ways_out(record, flag)
            if flag:
                problems.append(Problem("E-PRESET", wrong, remedy, feature.name, flag))
            else:
                left_out.append(HeldBack(feature.name, wrong, remedy=remedy, broken=True))
            continue
        for dest, value in preset.items():
            source = provenance[dest]
            if source == DEFAULT:
                setattr(args, dest, value)
                provenance[dest] = f"preset {feature.name}"
            elif source.startswith("preset ") and getattr(args, dest) != value:
                other, chosen = source.removeprefix("preset "), getattr(args, dest)
                flag = next(entry.flag.name for entry in entries if entry.flag.dest == dest)
                problems.append(
                    Problem(
                        "E-PRESET",
                        f"{other} presets {dest} to {chosen!r}, this feature to {value!r}",
                        f"give {flag} yourself, for instance {chosen!r} or {value!r}",
                        feature=feature.name,
                    )
                )
    return left_out


def with_presets(records: Iterable[FeatureRecord], args: Namespace) -> Iterator[FeatureRecord]:
    """Yield the features of the chosen level that have presets at all."""
    level = getattr(args, "optimization_level", 2)
    for record in records:
        own = record.cls.presets.__func__ is not Feature.presets.__func__  # type: ignore[attr-defined]
        if own and record.cls.level <= level:
            yield record


def apply_adopted_defaults(
    entries: Sequence[FlagEntry],
    records: Sequence[FeatureRecord],
    args: Namespace,
    provenance: dict[str, str],
) -> None:
    """Apply a feature's own default for a flag it adopted, while the feature is asked for.

    Changes ``args`` and ``provenance``.
    """
    wanted: dict[str, list[tuple[str, Any]]] = {}
    for entry in entries:
        for adoption in entry.adoptions:
            flag = adoption.flag
            if flag.default is None or flag.is_switch or flag.default == entry.flag.default:
                continue
            if provenance[entry.flag.dest] == DEFAULT:
                wanted.setdefault(adoption.owner, []).append((entry.flag.dest, flag.default))
    level = getattr(args, "optimization_level", 2)
    for feature in (record.cls for record in records):
        if feature.name not in wanted or feature.level > level:
            continue
        try:
            asked = feature.enabled(args)
        except Exception:
            # The resolver asks again and reports it; a feature that cannot say so is not asked for here.
            asked = False
        for dest, value in wanted[feature.name] if asked else ():
            if provenance[dest] == DEFAULT:
                setattr(args, dest, value)
                provenance[dest] = f"preset {feature.name}"

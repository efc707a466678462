"""Values that features fill in where the user gave none: presets, and other defaults of adopted flags."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from mindspeed_core.discovery.entry_points import describe
from mindspeed_core.feature import Feature
from mindspeed_core.flags.entries import FlagEntry
from mindspeed_core.resolver.plan import Problem

DEFAULT = "default"
"""Provenance of a value that nobody gave."""


def apply_presets(
    features: Sequence[type[Feature]], args: Namespace, provenance: dict[str, str], problems: list[Problem]
) -> None:
    """Let features fill in what nobody gave: change ``args`` and ``provenance``, add to ``problems``."""
    level = getattr(args, "optimization_level", 2)
    for feature in features:
        if feature.presets.__func__ is Feature.presets.__func__ or feature.level > level:  # type: ignore[attr-defined]
            continue
        try:
            preset = dict(feature.presets(args))
        except Exception as error:
            problems.append(
                Problem(
                    "E-PRESET",
                    f"its presets cannot be computed: {describe(error)}",
                    "check the values of its flags, or report it to its authors",
                    feature=feature.name,
                    flag=feature.flags[0].name if feature.flags else "",
                )
            )
            continue
        for dest, value in preset.items():
            source = provenance.get(dest)
            if source is None:
                problems.append(
                    Problem("E-PRESET", f"it presets {dest!r}, which no flag defines", feature=feature.name)
                )
            elif source == DEFAULT:
                setattr(args, dest, value)
                provenance[dest] = f"preset {feature.name}"
            elif source.startswith("preset ") and getattr(args, dest) != value:
                other = source.removeprefix("preset ")
                problems.append(
                    Problem(
                        "E-PRESET",
                        f"{other} presets {dest} to {getattr(args, dest)!r}, this feature to {value!r}",
                        "give the flag yourself",
                        feature=feature.name,
                    )
                )


def apply_adopted_defaults(
    entries: Sequence[FlagEntry],
    features: Sequence[type[Feature]],
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
    for feature in features:
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

"""The flag by which somebody asks for a feature, and what is said when the feature's own code fails.

A feature that fails although nobody asked for it is left out; one that is asked for is a problem.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mindspeed_core.discovery.entry_points import describe
from mindspeed_core.feature import Feature, Flag

if TYPE_CHECKING:
    from mindspeed_core.registry import FeatureRecord


def asking_flag(feature: type[Feature], args: Namespace, provenance: Mapping[str, str] | None) -> str:
    """Return the first flag of a feature that is given, or the preset that set it; empty where none is.

    The host's own choices of a flag that the feature extends do not ask for the feature. Without provenance
    a value that differs from the flag's default counts as given.
    """
    for flag in feature.flags:
        value = getattr(args, flag.dest, flag.default)
        if _is_another_owners(flag, value):
            continue
        if provenance is None:
            if value != flag.default:
                return flag.name
            continue
        source = provenance.get(flag.dest, "default")
        if source.startswith("flag "):
            return source.removeprefix("flag ")
        if source != "default":
            return f"{flag.name} by {source}"
    return ""


def failure(record: FeatureRecord, method: str, error: BaseException) -> str:
    """Return one sentence about a method of a feature that raised, with the package it is from."""
    place = describe(error, record.cls.__module__.partition(".")[0])
    return f"its {method} fails in {record.dist} {record.version}: {place}"


def ways_out(record: FeatureRecord, flag: str) -> str:
    """Return what to do about a feature whose own code fails, and that ``flag`` asks for."""
    drop = f"drop {flag}, or " if flag else ""
    return f"{drop}pip install --upgrade {record.dist}, or report it to its authors"


def _is_another_owners(flag: Flag, value: object) -> bool:
    return bool(flag.choices) and not flag.choices_from and flag.nargs is None and value not in flag.choices

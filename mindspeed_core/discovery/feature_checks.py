"""Checks of one feature's declaration by itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import Any

from mindspeed_core.errors import guess
from mindspeed_core.feature import (
    Conflict,
    Fallback,
    Feature,
    Flag,
    Patch,
    Proofs,
    Requirement,
    Scenario,
    TakeOver,
)

_KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
_STABILITY = ("stable", "prototype")
_FACTS = frozenset(name for name in vars(Feature) if not name.startswith("_"))


def _formula_problems(feature: type[Feature]) -> list[str]:
    problems = []
    for name, text in feature.formulas.items():
        try:
            ast.parse(text, mode="eval")
        except SyntaxError as error:
            problems.append(f"formulas: {name}: formula {text!r} is no expression: {error.msg}")
    return problems


def declared_features(declarations: Iterable[Any]) -> list[type[Feature]]:
    """Return the features among declarations, in order; slots, platforms and stages are left out."""
    return [item for item in declarations if _is_feature(item)]


def _is_feature(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, Feature)


def check_feature(feature: Any) -> list[str]:
    """Return what is wrong with one declaration, a sentence each; nothing when it is sound.

    Slot names, duplicate names, flags with two meanings and stage names depend on other declarations and are
    checked in `declaration_checks`.
    """
    if not _is_feature(feature):
        return [f"{feature!r} is not a subclass of mindspeed_core.Feature"]
    problems: list[str] = []
    if not isinstance(feature.name, str) or not _KEBAB.match(feature.name):
        problems.append(f"name {feature.name!r} is not kebab-case (for instance 'fused-rmsnorm')")
    if not feature.family:
        problems.append("family is empty")
    elif len(feature.family.split()) != 1:
        problems.append(
            f"family {feature.family!r} has blanks; it is typed without quotes, so join its words"
        )
    if not feature.summary or "\n" in feature.summary:
        problems.append("summary is not one line")
    if feature.stability not in _STABILITY:
        problems.append(f"stability {feature.stability!r} is not one of {', '.join(_STABILITY)}")
    if feature.level not in (0, 1, 2):
        problems.append(f"level {feature.level!r} is not 0, 1 or 2")
    for attribute, kind in (
        ("flags", Flag),
        ("requires", Requirement),
        ("conflicts", Conflict),
        ("takes_over", TakeOver),
        ("patches", Patch),
        ("verify", Scenario),
        ("after", str),
        ("before", str),
        ("slots", str),
        ("replaces_roles", str),
        ("packages", str),
        ("platforms", str),
        ("hosts", str),
        ("modes", str),
    ):
        value = getattr(feature, attribute)
        # Proofs in modules of their own are checked when they are read.
        if value is getattr(Feature, attribute) or isinstance(value, Proofs):
            continue
        if isinstance(value, str) or not isinstance(value, Sequence):
            problems.append(f"{attribute} is not a sequence of {kind.__name__}")
            continue
        problems += [
            f"{attribute}: {item!r} is not a {kind.__name__}" for item in value if not isinstance(item, kind)
        ]
    if not isinstance(feature.trains_nothing, str):
        problems.append(f"trains_nothing: {feature.trains_nothing!r} is no sentence")
    for attribute in ("fallback", "mode_fallback"):
        value = getattr(feature, attribute)
        if value is not None and not isinstance(value, Fallback):
            problems.append(f"{attribute}: {value!r} is not a Fallback")
    problems += _formula_problems(feature)
    hooks = feature.hooks()
    for klass in feature.__mro__[:-1]:
        if klass is Feature:
            break
        for attribute in vars(klass):
            if attribute.startswith("_") or attribute in _FACTS or attribute in hooks:
                continue
            problems.append(
                f"unknown attribute {attribute!r}: a fact the core does not know, or a method that lacks "
                f"@hookimpl (private names begin with an underscore){guess(attribute, _FACTS)}"
            )
    return problems

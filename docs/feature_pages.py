"""The page of each feature and the list of all, from what the features declare.

The list is a committed page, and leads to the text that each package has of its features. The page of one
feature is made for the site alone: the manual first, then flags that the manual has in no table, what is
declared, and one line about the proofs, which have a page of their own (`proofs_of_features`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

from feature_links import ROOT, manual_link, page_of
from flag_pages import flag_places
from proofs_of_features import proof_path, proof_summary
from tables import code, codes, flag_table, table

from mindspeed_core.feature import Conflict, Feature, Flag, Requirement
from mindspeed_core.registry import Registry

FEATURES = "docs/features"
"""Place of the features' pages in the site; no file lies there."""


def value_text(condition: Requirement | Conflict) -> str:
    """A flag with the values that count."""
    if condition.one_of:
        return f"{code(condition.flag)} one of {codes(condition.one_of)}"
    return code(condition.flag if condition.equals is None else f"{condition.flag} {condition.equals}")


def requirement_text(requirement: Requirement) -> str:
    """One requirement with its reason."""
    if requirement.any_of:
        condition = " or ".join(code(name) for name in requirement.any_of)
    elif requirement.flag:
        condition = value_text(requirement)
    else:
        condition = code(requirement.feature) + (" (switched on with it)" if requirement.implies else "")
    return f"{condition}: {requirement.reason}" if requirement.reason else condition


def conflict_text(conflict: Conflict) -> str:
    """One conflict with its reason."""
    condition = code(conflict.feature) if conflict.feature else value_text(conflict)
    return f"{condition}: {conflict.reason}" if conflict.reason else condition


def features_page(registry: Registry) -> str:
    """Every feature of the repository's plugins in one line each, by family."""
    lines = [
        "# Features",
        "",
        "What the plugins of this repository bring, a page for each feature; the site shows with it what",
        "the feature declares, its flags and its proofs.",
        "`mindspeed-features show NAME --all` prints the same for every feature that is installed",
        "where you are.",
    ]
    families: dict[str, list[tuple[str, type[Feature]]]] = {}
    for record in registry.features.values():
        families.setdefault(record.cls.family, []).append((record.dist, record.cls))
    for family, members in families.items():
        lines += ["", f"## {family}", ""]
        lines += table(
            ("feature", "what it does", "package", "switched on with", "platforms"),
            (
                (
                    manual_link(feature),
                    feature.summary,
                    code(dist),
                    code(feature.flags[0].name) if feature.flags else "",
                    codes(feature.platforms),
                )
                for dist, feature in members
            ),
        )
    return "\n".join(lines)


def feature_pages(registry: Registry) -> dict[str, str]:
    """The page of each feature, by the path that it would have in the repository."""
    places = flag_places(registry)
    return {
        f"{FEATURES}/{record.dist}/{name}.md": feature_page(record.dist, record.cls, places)
        for name, record in registry.features.items()
    }


def feature_page(dist: str, feature: type[Feature], places: Mapping[str, str] | None = None) -> str:
    """One feature: its manual, its flags, what it declares, and how many proofs hold it.

    Args:
        dist: package that brings the feature.
        feature: to describe.
        places: page and anchor of every flag, as `flag_places` gives them; flags elsewhere are named only.
    """
    place = f"{FEATURES}/{dist}"
    lines = [f"# {feature.name}", "", f"{feature.summary}.", ""]
    text = page_of(feature)
    if text is not None:
        relative = posixpath.relpath(text.relative_to(ROOT).as_posix(), place)
        lines += [f"[How it works]({relative})", ""]
    shown = tabled_flags(text.read_text(encoding="utf-8")) if text is not None else set()
    rest = [flag for flag in feature.flags if not shown.intersection(flag.options)]
    if rest:
        lines += ["## Further flags" if shown else "## Flags", "", *flag_table(rest), ""]
    rows = feature_rows(dist, feature, flag_links(feature.flags, places or {}, place))
    lines += ["## What it declares", "", *table(("fact", "value"), rows)]
    if feature.verify:
        link = posixpath.relpath(proof_path(dist, feature.name), place)
        lines += ["", "## How we know", "", f"{proof_summary(feature)}: [the proofs]({link})."]
    return "\n".join(lines)


def tabled_flags(text: str) -> set[str]:
    """The options that a manual explains in its tables of flags."""
    found: set[str] = set()
    for block in re.findall(r"^\| *flags? *\|.*\n\|[-| :]+\|\n((?:\|.*\n?)+)", text, re.MULTILINE):
        for row in block.splitlines():
            found.update(re.findall(r"--[a-z][\w-]*", row.split(" | ")[0]))
    return found


def flag_links(flags: tuple[Flag, ...], places: Mapping[str, str], place: str) -> str:
    """The flags of a feature, each a link to its row among all flags.

    Args:
        flags: of the feature.
        places: page and anchor of every flag.
        place: folder of the page that links.
    """
    links = []
    for flag in flags:
        page, _, anchor = places.get(flag.name, "").partition("#")
        name = code(flag.name)
        links.append(f"[{name}]({posixpath.relpath(page, place)}#{anchor})" if page else name)
    return ", ".join(links)


def feature_rows(dist: str, feature: type[Feature], flags: str) -> list[tuple[str, str]]:
    """List what a feature declares, leaving out what it does not."""
    stages = [
        f"{code(stage)} ({'wraps' if function.mindspeed_impl['wrapper'] else 'replaces'})"  # type: ignore[attr-defined]
        for stage, function in feature.hooks().items()
    ]
    facts = [
        text
        for text, value in (
            ("works on fake tensors", feature.fake_tensors),
            ("deterministic", feature.deterministic),
            ("changes what a checkpoint needs to be read", feature.affects_checkpoint),
        )
        if value
    ]
    if feature.checkpoint_as:
        facts.append(f"checkpoints are those of {code(feature.checkpoint_as)}")
    rows = [
        ("package", code(dist)),
        ("flags", flags),
        ("level, stability", f"{feature.level}, {feature.stability}"),
        ("stages", ", ".join(stages)),
        ("slots", codes(feature.slots)),
        ("requires", "<br>".join(map(requirement_text, feature.requires))),
        ("conflicts", "<br>".join(map(conflict_text, feature.conflicts))),
        ("comes after", codes(feature.after)),
        ("packages", codes(feature.packages)),
        ("platforms", codes(feature.platforms)),
        ("hosts", codes(feature.hosts)),
        ("fallback", feature.fallback.reason if feature.fallback else ""),
        ("modes", codes(feature.modes)),
        ("in other modes", feature.mode_fallback.reason if feature.mode_fallback else ""),
        ("patches", codes(patch.target for patch in feature.patches)),
        ("facts", ", ".join(facts)),
        ("formulas", "<br>".join(f"{name} = {code(text)}" for name, text in feature.formulas.items())),
        ("tuning", "<br>".join(f"{code(flag)}: {codes(values)}" for flag, values in feature.tuning.items())),
    ]
    return [(name, text) for name, text in rows if text]

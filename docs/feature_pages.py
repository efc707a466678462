"""The page of each feature and the list of all, from what the features declare and what their proofs gave.

The list is a committed page, and leads to the text that each package has of its features. The page of one
feature is made for the site alone.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from proofs import recorded
from tables import code, codes, flag_table, table

from mindspeed_core.feature import Conflict, Feature, Requirement, Scenario
from mindspeed_core.registry import Registry

ROOT = Path(__file__).resolve().parent.parent
FEATURES = "docs/features"
"""Place of the features' pages in the site; no file lies there."""


def page_of(feature: type[Feature]) -> Path | None:
    """The feature's own page in this repository."""
    package, _, relative = feature.docs.partition(":")
    return next(iter(sorted(ROOT.glob(f"plugins/*/src/{package}/{relative}"))), None) if relative else None


def manual_link(feature: type[Feature]) -> str:
    """A link from a reference page to the feature's own page; its name where it has none here."""
    text = page_of(feature)
    if text is None:
        return code(feature.name)
    return f"[{feature.name}](../../{text.relative_to(ROOT).as_posix()})"


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
    return {
        f"{FEATURES}/{record.dist}/{name}.md": feature_page(record.dist, record.cls)
        for name, record in registry.features.items()
    }


def feature_page(dist: str, feature: type[Feature]) -> str:
    """One feature: what it declares, its flags, its proofs and what they gave."""
    lines = [f"# {feature.name}", "", f"{feature.summary}.", ""]
    text = page_of(feature)
    if text is not None:
        relative = posixpath.relpath(text.relative_to(ROOT).as_posix(), f"{FEATURES}/{dist}")
        lines += [f"[How it works]({relative})", ""]
    lines += ["## What it declares", "", *table(("fact", "value"), feature_rows(dist, feature))]
    if feature.flags:
        lines += ["", "## Its flags", "", *flag_table(feature.flags)]
    if feature.verify:
        lines += ["", "## Its proofs", "", *proof_lines(feature)]
    return "\n".join(lines)


def proof_lines(feature: type[Feature]) -> list[str]:
    """The proofs of a feature, and where their results come from."""
    where, results = recorded(feature)
    lines = [
        f"`mindspeed-features verify {feature.name}` trains a small model for each of these and compares",
        "losses, gradients and weights: with and without the feature, or, where a row says *resumed*, a",
        "training with its continuation from a checkpoint, in the same layout and in another one.",
        "",
        *table(
            ("proof", "processes", "steps", "allowed", "largest error", "measured"),
            (
                (
                    code(scenario.name),
                    scenario.world_size
                    if then is None
                    else f"{scenario.world_size}, resumed on {then.world_size}",
                    scenario.steps if then is None else f"{scenario.steps} + {then.steps}",
                    f"{scenario.tolerance:g}" if scenario.tolerance else "bit for bit",
                    *result_cells(results.get(scenario.name)),
                )
                for scenario in feature.verify
                for then in [scenario.resume]
            ),
        ),
    ]
    if results:
        versions = ", ".join(f"{name} {value}" for name, value in where.items() if name != "platform")
        lines += ["", f"Results of platform `{where['platform']}` with {versions}."]
    for scenario in feature.verify:
        lines += ["", f"### {scenario.name}", "", *command_lines(scenario)]
    return lines


def result_cells(result: Mapping[str, Any] | None) -> tuple[str, str]:
    """The largest error of a proof that was run, and what was measured."""
    if result is None:
        return "not recorded", ""
    return f"{result['largest_error']:.1e}", "<br>".join(filter(None, map(_measured, result["gains"])))


def _measured(gain: Mapping[str, Any]) -> str:
    # Results of former versions have the bound of the ratio alone.
    bound = gain.get("at_most")
    demand = gain.get("demand", "" if bound is None else f"at most {bound:g}")
    if gain["ratio"] is not None:
        return f"{gain['measure']} × {gain['ratio']:.3g}" + (f" ({demand})" if demand else "")
    value = gain.get("feature")
    return "" if value is None else f"{gain['measure']} {value:,.6g}" + (f" ({demand})" if demand else "")


def command_lines(scenario: Scenario) -> Iterable[str]:
    """The two command lines of a proof, what both have in common said once."""
    ours, theirs = (_options(flags) for _, flags, _ in scenario.sides())
    common = [option for option in theirs if option in ours]
    with_it = [option for option in ours if option not in common]
    without = [option for option in theirs if option not in common]
    names = ("with the feature", "with the feature, too" if scenario.same_feature else "without")
    if scenario.resume is not None:
        names = ("saved", "resumed in the other layout")
    rows = (("both", common), (names[0], with_it), (names[1], without))
    return table(("side", "flags"), ((side, code(" ".join(flags)) or "none") for side, flags in rows))


def _options(flags: Sequence[str]) -> list[str]:
    """Options with their values: ``--num-layers 2`` is one of them."""
    found: list[str] = []
    for text in flags:
        if text.startswith("--") or not found:
            found.append(text)
        else:
            found[-1] += f" {text}"
    return found


def feature_rows(dist: str, feature: type[Feature]) -> list[tuple[str, str]]:
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
    rows = [
        ("package", code(dist)),
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
        ("patches", codes(patch.target for patch in feature.patches)),
        ("facts", ", ".join(facts)),
        ("formulas", "<br>".join(f"{name} = {code(text)}" for name, text in feature.formulas.items())),
        ("tuning", "<br>".join(f"{code(flag)}: {codes(values)}" for flag, values in feature.tuning.items())),
    ]
    return [(name, text) for name, text in rows if text]

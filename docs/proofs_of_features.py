"""The page of proofs of each feature, from what the features declare and what their proofs gave.

These pages are evidence: they are made for the site alone, reached from the page of the feature, and stay
out of the search.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proofs import recorded
from tables import code, table

from mindspeed_core.feature import Feature, Scenario
from mindspeed_core.registry import Registry

PROOFS = "docs/proofs"
"""Place of these pages in the site; only the recorded results lie there."""


def proof_path(dist: str, name: str) -> str:
    """The path that the proofs of a feature would have in the repository."""
    return f"{PROOFS}/{dist}/{name}.md"


def proof_pages(registry: Registry) -> dict[str, str]:
    """The proofs of each feature that has some, by the path they would have in the repository."""
    return {
        proof_path(record.dist, name): proof_page(record.dist, record.cls)
        for name, record in registry.features.items()
        if record.cls.verify
    }


def proof_page(dist: str, feature: type[Feature]) -> str:
    """The proofs of one feature."""
    back = posixpath.relpath(f"docs/features/{dist}/{feature.name}.md", f"{PROOFS}/{dist}")
    lines = [f"# Proofs of {feature.name}", "", f"What holds [{feature.name}]({back}) to its promise.", ""]
    return "\n".join([*lines, *proof_lines(feature)])


def proof_summary(feature: type[Feature]) -> str:
    """The proofs of a feature in one line: how many, the largest error, where they ran."""
    where, results = recorded(feature)
    number = len(feature.verify)
    text = f"{number} proof{'s' if number > 1 else ''}"
    if not results:
        return f"{text}, not recorded here"
    largest = max(result["largest_error"] for result in results.values())
    text += f", largest error {f'{largest:.1e}' if largest else '0'}"
    if len(results) < number:
        text += f" ({number - len(results)} not recorded here)"
    versions = ", ".join(f"{name} {value}" for name, value in where.items() if name != "platform")
    return f"{text}, run on platform `{where['platform']}` with {versions}"


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

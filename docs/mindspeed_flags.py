"""The place of each flag of MindSpeed, the monolithic library.

``mindspeed.json`` holds facts: which option strings its release branches define. Where a flag is found
here follows from the declarations of this repository, from the announced packages, and from the table of
verdicts in `mindspeed_megatron.upstream`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from feature_links import manual_link
from tables import code, table

from mindspeed_core.flags.announced import flag_owners
from mindspeed_core.flags.core import CORE_OWNER
from mindspeed_core.flags.entries import FlagEntry
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import Registry
from mindspeed_megatron.upstream.verdicts import NOTED, REFUSED, TRANSLATED, USED
from mindspeed_train.arguments import megatron_lm_answers

FACTS = Path(__file__).with_name("mindspeed.json")
ANNOUNCED = "announced"
MEANINGS = {
    USED: "Type them as before.",
    TRANSLATED: "Type them as before: they are read as what is named, with a note.",
    NOTED: "Type them or not: they change nothing here, and a run says so.",
    ANNOUNCED: "Planned for the package named; until it is there, the plan names it and stops.",
    REFUSED: "Without them a run would train, save or read something else: the plan says what to do.",
}


@dataclass(frozen=True)
class Answer:
    """Name the place of one flag of MindSpeed here."""

    option: str
    branches: tuple[str, ...]
    status: str
    text: str


def answers(registry: Registry) -> Iterator[Answer]:
    """Every flag of MindSpeed with what holds for it.

    Raises:
        LookupError: a flag is declared by nobody, announced by nobody and named by no verdict.
    """
    facts: Mapping[str, Mapping[str, list[str]]] = json.loads(FACTS.read_text(encoding="utf-8"))
    flags = {option: entry for entry in flag_set(registry).entries for option in entry.flag.options}
    upstream = {
        answer.option: answer
        for answer in megatron_lm_answers.answers({option: entry.flag for option, entry in flags.items()})
    }
    for option, branches in facts["flags"].items():
        feature = _feature(flags.get(option), option, upstream.get(option), registry)
        if feature:
            record = registry.features[feature]
            status, text = USED, f"{manual_link(record.cls)} of {code(record.dist)}"
        elif option in upstream and upstream[option].status != USED:
            status, text = upstream[option].status, upstream[option].reason
        elif option in flags:
            by_core = flags[option].owner == CORE_OWNER
            status, text = USED, "the core" if by_core else "Megatron-LM's own; `mindspeed-train` has it"
            text += f": {upstream[option].reason}" if option in upstream and upstream[option].reason else ""
        else:
            status, text = _elsewhere(option)
        yield Answer(option, tuple(branches), status, text)


def _feature(
    entry: FlagEntry | None, option: str, answer: megatron_lm_answers.Answer | None, registry: Registry
) -> str:
    """Name the feature whose flag it is, or without which the host refuses it; empty for none."""
    if entry is None:
        return ""
    owners = [entry.owner]
    refused = answer is not None and answer.status == REFUSED
    if refused or option != entry.flag.name:
        owners += (adoption.owner for adoption in entry.adoptions if option in adoption.flag.options)
    return next((owner for owner in owners if owner in registry.features), "")


def _elsewhere(option: str) -> tuple[str, str]:
    owner = flag_owners().get(option, "")
    try:
        judged = megatron_lm_answers.judged((option,))
    except LookupError:
        if not owner:
            raise
        return ANNOUNCED, code(owner)
    announced = owner and judged.status == NOTED and "noted:" in judged.reason
    return (ANNOUNCED, f"{code(owner)}; {judged.reason}") if announced else (judged.status, judged.reason)


def mindspeed_page(registry: Registry) -> str:
    """Every flag of MindSpeed, by what became of it."""
    found = list(answers(registry))
    branches = json.loads(FACTS.read_text(encoding="utf-8"))["branches"]
    counts = ", ".join(f"{sum(a.status == status for a in found)} {status}" for status in MEANINGS)
    lines = [
        "# MindSpeed's flags",
        "",
        f"The {len(found)} training flags that MindSpeed's branches {', '.join(map(code, branches))} add to",
        f"Megatron-LM's, and where they are found now: {counts}.",
        "[Moving from MindSpeed](../migration.md) says how the rest of a project moves.",
    ]
    for status, meaning in MEANINGS.items():
        rows = [
            (code(a.option), a.text, "all" if len(a.branches) == len(branches) else ", ".join(a.branches))
            for a in found
            if a.status == status
        ]
        lines += ["", f"## {status}", "", meaning, ""]
        lines += table(("old flag", "now", "branches that have it"), rows)
    return "\n".join(lines)

"""Answers for each training flag of Megatron-LM: used, noted, translated or refused, with the reason.

A flag that the host has is used, unless `refusals` says something of it whatever its value; for every other
one `mindspeed_megatron.upstream` has the verdict. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_megatron.upstream.megatron_lm_flags import megatron_lm_flags
from mindspeed_megatron.upstream.table import VERDICTS
from mindspeed_megatron.upstream.translations import TRANSLATIONS
from mindspeed_megatron.upstream.verdicts import NOTED, REFUSED, TRANSLATED, USED
from mindspeed_train.arguments.refusals import REFUSALS, Refusal

if TYPE_CHECKING:
    from mindspeed_core.feature import Flag

ALWAYS = "Accepted; "
"""The beginning of the help of a flag that changes nothing: its behaviour is the default."""


@dataclass(frozen=True)
class Answer:
    """The answer for one flag.

    Attributes:
        option: the flag's first spelling in Megatron-LM.
        status: ``used``, ``noted``, ``translated`` or ``refused``.
        reason: why so; for a used flag, a default that differs and values that are refused.
    """

    option: str
    status: str
    reason: str


def answers(
    present: Mapping[str, Flag],
    packages: Mapping[str, str] | None = None,
    adopters: Mapping[str, str] | None = None,
) -> Iterator[Answer]:
    """Yield the answer for each of Megatron-LM's flags, in its order.

    Args:
        present: the host's flags by option string.
        packages: the distribution that brings a flag, by option string, for flags that are not the host's.
        adopters: the distribution whose feature takes care of a flag of the host, by option string.

    Raises:
        LookupError: a flag is neither there nor named by a rule.
    """
    for facts in megatron_lm_flags()[1]:
        options = facts["options"]
        flag = next((present[option] for option in options if option in present), None)
        if flag is not None:
            yield _present(facts, flag, _first(options, packages), _first(options, adopters))
            continue
        yield judged(options)


def judged(options: Sequence[str]) -> Answer:
    """Return the answer of the table of verdicts for the spellings of a flag that nobody declares.

    Raises:
        LookupError: no verdict names it.
    """
    for option in options:
        entry = TRANSLATIONS.get(option)
        if entry is not None:
            return Answer(options[0], TRANSLATED, f"read as {entry.reads}")
        found = [verdict for verdict in VERDICTS if verdict.covers(option)]
        if found:
            said = [f"{' or '.join(v.values)} {v.kind}: {v.reason}" if v.values else v.reason for v in found]
            last = found[-1]
            remedy = f"; {last.remedy}" if last.remedy else ""
            return Answer(options[0], last.kind, "; ".join(said) + remedy)
    raise LookupError(
        f"{options[0]} is neither declared nor named by a verdict of mindspeed_megatron.upstream"
    )


def _first(options: Sequence[str], by_option: Mapping[str, str] | None) -> str:
    return next((by_option[option] for option in options if option in by_option), "") if by_option else ""


def _present(facts: Mapping[str, Any], flag: Flag, package: str, adopter: str) -> Answer:
    notes = [
        f"with {package}" if package else "",
        _difference(facts, flag.default),
        _fewer_choices(facts, flag),
    ]
    for refusal in (refusal for refusal in REFUSALS if refusal.dest == flag.dest):
        # A switch has one value that somebody gives.
        some_values = refusal.values and facts["value"] != "switch"
        if not (refusal.without or some_values or refusal.platforms):
            if adopter and not refusal.stands_down:
                notes.append(f"with {adopter}, and refused without: {refusal.reason}")
                continue
            verdict = NOTED if refusal.stands_down else REFUSED
            return Answer(facts["options"][0], verdict, f"{refusal.reason}; {refusal.remedy}")
        values = " or ".join(map(str, refusal.values))
        where = f" on {' and '.join(refusal.platforms)}" if refusal.platforms else ""
        said = "changes nothing" if refusal.stands_down else "refused"
        notes.append(f"{values} {said}".lstrip() + f"{_condition(refusal)}{where}: {refusal.reason}")
    return Answer(facts["options"][0], USED, "; ".join(note for note in notes if note))


def _fewer_choices(facts: Mapping[str, Any], flag: Flag) -> str:
    """Name the values that Megatron-LM takes and this host does not."""
    if flag.help.startswith(ALWAYS):
        return "always so here"
    theirs = facts.get("choices", ())
    ours = [choice for choice in theirs if choice in (flag.choices or theirs)]
    missing = [choice for choice in theirs if choice not in ours]
    if len(missing) > len(ours):
        return f"{' or '.join(map(str, ours))} alone"
    return f"not {' or '.join(map(str, missing))}" if missing else ""


def _condition(refusal: Refusal) -> str:
    if refusal.without == "te":
        return " without --transformer-impl transformer_engine"
    return f" without the package {refusal.without}" if refusal.without else ""


def _difference(facts: Mapping[str, Any], default: Any) -> str:
    """Name a default that differs from Megatron-LM's, where both are plain values."""
    theirs = facts.get("default")
    if isinstance(default, (list, tuple)) and len(default) == 1:
        default = default[0]
    if facts["value"] == "switch" or theirs is None or default is None or theirs == default:
        return ""
    if isinstance(theirs, str) != isinstance(default, str) or isinstance(theirs, list):
        return ""
    return f"default {default}, in Megatron-LM {theirs}"

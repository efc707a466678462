"""Answers for each training flag of Megatron-LM: supported, refused with the reason, not applicable.

A flag that the host has is supported unless `refusals` refuses it whatever its value; for every other one
`mindspeed_core.megatron.megatron_lm_flags` has the reason. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_core.hosts.standalone.arguments.refusals import REFUSALS, Refusal
from mindspeed_core.megatron.megatron_lm_flags import REFUSED, megatron_lm_flags, rule_for

if TYPE_CHECKING:
    from mindspeed_core.feature import Flag

SUPPORTED = "supported"
ALWAYS = "Accepted; "
"""The beginning of the help of a flag that changes nothing: its behaviour is the default."""


@dataclass(frozen=True)
class Answer:
    """The answer for one flag.

    Attributes:
        option: the flag's first spelling in Megatron-LM.
        status: ``supported``, ``refused`` or ``not applicable``.
        reason: why not; for a supported flag, a default that differs and values that are refused.
    """

    option: str
    status: str
    reason: str


def answers(present: Mapping[str, Flag], packages: Mapping[str, str] | None = None) -> Iterator[Answer]:
    """Yield the answer for each of Megatron-LM's flags, in its order.

    Args:
        present: the host's flags by option string.
        packages: the distribution that brings a flag, by option string, for flags that are not the host's.

    Raises:
        LookupError: a flag is neither there nor named by a rule.
    """
    for facts in megatron_lm_flags()[1]:
        options = facts["options"]
        flag = next((present[option] for option in options if option in present), None)
        if flag is not None:
            package = next((packages[o] for o in options if o in packages), "") if packages else ""
            yield _present(facts, flag, package)
            continue
        rule = next((rule for rule in map(rule_for, options) if rule is not None), None)
        if rule is None:
            raise LookupError(
                f"{options[0]} is neither supported nor named by a rule of {rule_for.__module__}"
            )
        yield Answer(options[0], rule.status, rule.reason)


def _present(facts: Mapping[str, Any], flag: Flag, package: str) -> Answer:
    notes = [
        f"with {package}" if package else "",
        _difference(facts, flag.default),
        _fewer_choices(facts, flag),
    ]
    for refusal in (refusal for refusal in REFUSALS if refusal.dest == flag.dest):
        if not (refusal.without or refusal.values or refusal.platforms):
            return Answer(facts["options"][0], REFUSED, f"{refusal.reason}; {refusal.remedy}")
        values = " or ".join(map(str, refusal.values))
        where = f" on {' and '.join(refusal.platforms)}" if refusal.platforms else ""
        notes.append(f"{values or 'refused'}{' refused' if values else ''}{_condition(refusal)}{where}")
        notes[-1] += f": {refusal.reason}"
    return Answer(facts["options"][0], SUPPORTED, "; ".join(note for note in notes if note))


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

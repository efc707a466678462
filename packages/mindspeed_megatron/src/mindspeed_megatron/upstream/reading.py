"""Reading of flags that were written for another program: verdicts and translations before parsing.

A command line and a dictionary come as `Given` flags and leave as such, with notes on what was left out or
is read otherwise, and the problems of what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mindspeed_core.flags.notes import FlagNote
from mindspeed_core.resolver.plan import Problem
from mindspeed_megatron.upstream.given import ChangesNothing, Given, Line, Outcome, Refused, Translated
from mindspeed_megatron.upstream.table import is_judged, takes_no_value, verdict_on
from mindspeed_megatron.upstream.translations import ALWAYS, NEVER, TRANSLATIONS
from mindspeed_megatron.upstream.verdicts import NOTED


@dataclass
class Read:
    """The flags to parse, and what is to be said about those that are not among them any more."""

    given: list[Given] = field(default_factory=list)
    notes: list[FlagNote] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read(
    given: Sequence[Given],
    knows: Callable[[str], bool],
    accepts: Callable[[str, Sequence[str]], bool],
    claimed: Callable[[str], bool] = lambda option: False,
) -> Read:
    """Translate what is spelled otherwise and leave out what changes nothing.

    Args:
        given: the flags in their order.
        knows: says whether somebody here declares an option.
        accepts: says whether the declared flag takes these values.
        claimed: says whether an option belongs to a package that is there and cannot be loaded; such a flag
            is never judged here.
    """
    line, found = Line(_by_newer_names(given, knows), knows), Read()
    as_given = Line(given, knows)
    without: set[str] = set()
    outcomes: list[tuple[Given, Outcome | None]] = []
    for one in given:
        if one.is_off and not knows(one.option) and is_judged(one.option):
            continue
        outcome = None if one.is_off or claimed(one.option) else _judge(one, line, accepts)
        if isinstance(outcome, Translated):
            lacking = [token for token in outcome.tokens if token.startswith("--") and not knows(token)]
            if lacking:
                outcome = _without_counterpart(outcome, lacking[0])
        outcomes.append((one, outcome))
        if isinstance(outcome, Translated):
            without |= {*outcome.without}
    made: dict[str, tuple[tuple[str, ...], Given]] = {}
    for one, outcome in outcomes:
        if outcome is None:
            if one.option not in without:
                found.given.append(one)
        elif isinstance(outcome, ChangesNothing):
            found.notes.append(FlagNote(str(one), outcome.reason))
        elif isinstance(outcome, Refused):
            found.problems.append(
                Problem("E-UPSTREAM-FLAG", outcome.reason, outcome.remedy, flag=one.option, value=_shown(one))
            )
        elif _is_left_out(one, without):
            found.notes.append(FlagNote(str(one), "another flag of the line says so", "left out"))
        else:
            new_ones = [token for token in outcome.tokens if token.startswith("--")]
            gone = [o for o in outcome.without if line.has(o) and o != one.option and o not in new_ones]
            read_as = " ".join((*outcome.tokens, *(f"no {option}" for option in gone)))
            found.notes.append(FlagNote(str(one), outcome.because, read_as or "given with it"))
            for new in flags_of(outcome.tokens):
                made.setdefault(new.option, (new.words, one))
                found.problems += _contradictions(new, one, as_given, made, without)
                found.given.append(new)
    return found


def _by_newer_names(given: Sequence[Given], knows: Callable[[str], bool]) -> list[Given]:
    """Return the flags, and those with older names under their newer ones too."""
    found: list[Given] = []
    for one in given:
        found.append(one)
        entry = TRANSLATIONS.get(one.option)
        if entry is not None and entry.older_name_of and not one.is_off and not knows(one.option):
            found.append(Given(entry.older_name_of, one.words))
    return found


def _is_left_out(one: Given, without: set[str]) -> bool:
    """Return whether another flag takes away what this one is an older name of."""
    return TRANSLATIONS[one.option].older_name_of in without


def _without_counterpart(outcome: Translated, lacking: str) -> Outcome:
    """Judge a translation to a flag that the host does not have: nothing is lost where it is noted."""
    new = flags_of(outcome.tokens)
    verdict = verdict_on(lacking, new[0].words) if len(new) == 1 else None
    if verdict is not None and verdict.kind == NOTED:
        return ChangesNothing(verdict.reason)
    reason = f"it is read as {lacking}, which this host does not have"
    return Refused(reason, "leave it out, or use mindspeed-train")


def _judge(one: Given, line: Line, accepts: Callable[[str, Sequence[str]], bool]) -> Outcome | None:
    declared = line.knows(one.option)
    entry = TRANSLATIONS.get(one.option)
    if entry is not None:
        # A choice that somebody adds to a declared flag is theirs to honour.
        mute = (
            declared
            and entry.declared != ALWAYS
            and (entry.declared == NEVER or accepts(one.option, one.words))
        )
        outcome = None if mute else entry.translate(one, line)
        if outcome is not None:
            return outcome
    if declared:
        return None
    verdict = verdict_on(one.option, one.words)
    if verdict is None or verdict.kind != NOTED:
        return None
    if one.words and not one.named and takes_no_value(one.option):
        return Refused("the flag is a switch and takes no value", "drop the value")
    return ChangesNothing(verdict.reason)


def flags_of(tokens: Sequence[str]) -> list[Given]:
    """Return the flags in a list of words."""
    found: list[Given] = []
    for token in tokens:
        if token.startswith("--"):
            found.append(Given(token))
        else:
            found[-1] = Given(found[-1].option, (*found[-1].values, token))
    return found


def _contradictions(
    new: Given,
    one: Given,
    line: Line,
    made: dict[str, tuple[tuple[str, ...], Given]],
    without: set[str],
) -> list[Problem]:
    """Return the problem of a translation that another flag contradicts."""
    other, said = made[new.option]
    if other != new.words:
        return [_contradiction(new, one, f"{said} is read as {new.option} {' '.join(other)}")]
    given = new.option not in without and new.option != one.option and line.has(new.option)
    if given and line.words(new.option) != new.words:
        return [_contradiction(new, one, f"{new.option} {' '.join(line.words(new.option))} is given too")]
    return []


def _contradiction(new: Given, one: Given, reason: str) -> Problem:
    return Problem(
        "E-UPSTREAM-FLAG",
        f"is read as {new}, but {reason}",
        "keep one of the two",
        flag=one.option,
        value=_shown(one),
    )


def _shown(one: Given) -> str:
    return " ".join(one.words)[:60]

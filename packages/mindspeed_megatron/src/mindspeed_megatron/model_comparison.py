"""The comparison of a checkpoint's model with the model that its weights go into.

Weights fit into any model whose tensors have their shapes; whether they mean the same there only the records
of both models say. Which differences matter is decided in `model_fields`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError, CheckpointError
from mindspeed_megatron.config_fields import config_fields
from mindspeed_megatron.config_flags import dest_of
from mindspeed_megatron.flags import describing_flags
from mindspeed_megatron.model_fields import ARGUMENTS, Verdict, is_known, rule_of, verdict_of

if TYPE_CHECKING:
    from mindspeed_core.session import Session
    from mindspeed_megatron.model_record import ModelRecord


_ROUNDING = 1e-6
"""Relative difference of two numbers that is none."""


@dataclass(frozen=True)
class Difference:
    """A field that differs.

    Attributes:
        name: of the field, or of a fact.
        saved: the checkpoint's value.
        now: this run's value.
        verdict: what that means.
    """

    name: str
    saved: Any
    now: Any
    verdict: Verdict

    def __str__(self) -> str:
        return f"{_shown(self.name)} {_value(self.saved)} (checkpoint) / {_value(self.now)} (this run)"


def differences(saved: ModelRecord, now: ModelRecord, *, with_facts: bool = True) -> tuple[Difference, ...]:
    """List what differs and matters.

    Args:
        saved: the record of a checkpoint.
        now: the record of this run.
        with_facts: compare what features say too.
    """
    before, today = saved.fields, now.fields
    found: list[Difference] = []
    for name in dict.fromkeys((*today, *before)):
        if name not in before:
            if not saved.complete or name not in now.config:
                continue
            before_value = now.defaults.get(name)
        else:
            before_value = before[name]
        if name not in today and (not saved.complete or name not in saved.config):
            continue
        verdict = verdict_of(name, before, today)
        if verdict is not Verdict.SILENT and not _same(before_value, today.get(name)):
            found.append(Difference(name, before_value, today.get(name), verdict))
    if len(found) > 1 and any(rule_of(one.name).reason == "rotary positions" for one in found):
        # The frequencies follow from the flags that are named already.
        found = [one for one in found if one.name != "rotary_frequencies"]
    if with_facts and saved.complete:
        found += [
            Difference(name, saved.facts.get(name), now.facts.get(name), Verdict.FUNCTION)
            for name in dict.fromkeys((*now.facts, *saved.facts))
            if not _same(saved.facts.get(name), now.facts.get(name))
        ]
    return tuple(found)


def check_model(
    session: Session,
    saved: ModelRecord,
    now: ModelRecord,
    where: str,
    *,
    resumes: bool,
    with_facts: bool = True,
) -> list[str]:
    """Refuse the weights of a model that computes something else.

    Args:
        session: the open session; ``--allow-other-model`` names fields that may differ.
        saved: the record of the checkpoint.
        now: the record of this run.
        where: the checkpoint.
        resumes: a training goes on, so that changes of how it trains are worth a line.
        with_facts: compare what features say too.

    Returns:
        What a user should know, one sentence each; to be printed by one rank.

    Raises:
        CheckpointError: a field that changes the function differs; names both values.
        ArgumentError: ``--allow-other-model`` names something that is no field.
    """
    found = differences(saved, now, with_facts=with_facts)
    allowed = _allowed(getattr(session.args, "allow_other_model", None) or (), saved, now)
    function = [one for one in found if one.verdict is Verdict.FUNCTION]
    refused = [one for one in function if one.name not in allowed]
    if refused:
        names = " ".join(one.name for one in refused)
        raise CheckpointError(
            f"{where}: its weights are those of another model: {'; '.join(map(str, refused))}. Give the "
            f"model's own flags, or load them into this model all the same with --allow-other-model {names}"
        )
    notes = []
    accepted = [one for one in function if one.name in allowed]
    if accepted:
        text = "; ".join(map(str, accepted))
        notes.append(f"{where}: loaded into another model (--allow-other-model): {text}")
    changed = [one for one in found if one.verdict is Verdict.TRAINING]
    if resumes and changed:
        notices = dict.fromkeys(filter(None, (rule_of(one.name).notice for one in changed)))
        text = "; ".join((*map(str, changed), *notices))
        notes.append(f"{where}: trained otherwise from here on: {text}")
    return notes


def _allowed(names: Sequence[str], saved: ModelRecord, now: ModelRecord) -> set[str]:
    found: set[str] = set()
    known = {*saved.fields, *now.fields, *saved.facts, *now.facts}
    for given in names:
        name = given.lstrip("-").replace("-", "_")
        meant = ARGUMENTS.get(name) or _fields_by_dest().get(name) or (name,)
        if not any(one in known or is_known(one) for one in meant):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "the refusal of a checkpoint names the fields"
            raise ArgumentError("--allow-other-model", given, "no model has such a field", hint)
        found.update(meant)
    return found


@cache
def _fields_by_dest() -> Mapping[str, tuple[str, ...]]:
    return {dest_of(one.name): (one.name,) for one in config_fields() if dest_of(one.name) != one.name}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        # Devices compute frequencies of rotary positions with different rounding.
        return math.isclose(one, other, rel_tol=_ROUNDING)
    return bool(one == other) or (not one and not other)


def _value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return str(value)


def _shown(name: str) -> str:
    """Return the flag of a field, where its values are those of the field; otherwise its name."""
    return _options().get(name, name)


@cache
def _options() -> Mapping[str, str]:
    valued = {flag.dest: flag.name for flag in describing_flags() if not flag.is_switch}
    names: Iterator[str] = iter((*valued, *(one for meant in _fields_by_dest().values() for one in meant)))
    return {name: valued[dest_of(name)] for name in names if dest_of(name) in valued}

"""Features that make the best layout faster: the flags that installed features state to be worth searching.

All combinations of forty flags are too many, and most of them do not depend on each other: every value is
tried on the best layout alone, and what is faster is then put together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_tune.candidate import Candidate
from mindspeed_tune.layout_space import SIZES
from mindspeed_tune.ranked import Ranked
from mindspeed_tune.search import Search
from mindspeed_tune.threads import waiting_threads
from mindspeed_tune.warm_process import PlanError

_WORTH = 0.001
"""Part of the step that a value must save to be taken."""


@dataclass(frozen=True)
class Tried:
    """A value of a feature's flag on the best layout.

    Attributes:
        flag: which.
        value: which.
        feature: that declares it.
        gain: part of the step's seconds that it saves; negative where it costs some.
        memory: bytes that it saves on the fullest rank.
    """

    flag: str
    value: Any
    feature: str
    gain: float
    memory: float


def tune_features(search: Search) -> list[Tried]:
    """Try the values that features state for their flags on the best layout; put the good ones together.

    What changes losses is not tried: flags that say so, and those that the command or the space file sets.

    Returns:
        Every value that was tried, the best first. The candidate with all the good ones joins the ranking.
    """
    best = search.best()[0]
    trials = [
        (flag, value, feature, best.candidate.with_settings({flag: value}))
        for flag, value, feature in _values(search)
    ]
    active = [one for one in trials if _takes_part(search, best, one[3], one[2])]
    found: list[Tried] = []
    with waiting_threads(max(1, search.process.parallel // 2)) as pool:
        started = []
        for flag, value, feature, candidate in active:
            if search.is_over():
                search.notes.append("the budget ended before all features were tried")
                break
            started.append((flag, value, feature, candidate, pool.submit(search.plan, candidate)))
        for flag, value, feature, candidate, future in started:
            try:
                estimate = future.result()
            except PlanError as error:
                search.validity.refuse(candidate, str(error))
                continue
            gain = 1 - estimate.seconds / best.estimate.seconds
            found.append(Tried(flag, value, feature, gain, best.estimate.needed - estimate.needed))
            search.take(candidate, estimate)
    found.sort(key=lambda one: (-one.gain, one.flag, str(one.value)))
    _put_together(search, best, found)
    return found


def _put_together(search: Search, best: Ranked, found: list[Tried]) -> None:
    settings: dict[str, Any] = {}
    for one in found:
        if one.gain <= _WORTH or one.flag in settings:
            continue
        together = best.candidate.with_settings({**settings, one.flag: one.value})
        if search.args_of(together) is not None:
            settings[one.flag] = one.value
    if len(settings) < 2:
        return
    together = best.candidate.with_settings(settings)
    try:
        search.take(together, search.plan(together))
    except PlanError as error:
        search.validity.refuse(together, str(error))


def _values(search: Search) -> Iterator[tuple[str, Any, str]]:
    given = search.given()
    for name, record in search.registry.features.items():
        by_name = {flag.name: flag for flag in record.cls.flags}
        for option, values in record.cls.tuning.items():
            flag = by_name.get(option)
            if flag is None or option in SIZES or option in search.space.flags or flag.changes_training:
                continue
            for value in values:
                if value != getattr(given, flag.dest, flag.default):
                    yield option, value, name


def _takes_part(search: Search, best: Ranked, candidate: Candidate, feature: str) -> bool:
    """Return whether a candidate may start, and what is active differs from the best layout's."""
    plan = search.validity.plan_of(candidate)
    before = search.validity.plan_of(best.candidate)
    if plan is None or before is None or plan.digest == before.digest:
        return False
    record = search.registry.features[feature].cls
    if feature in plan.names and record.fake_tensors is not True:
        search.notes.append(
            f"{feature}: does not state that it works on tensors without values: {candidate.label} is only "
            "measured, with --tune-refine short-runs"
        )
        search.only_measured.append(candidate)
        return False
    return True

"""The schedule that the simulator finds shortest for given sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from mindspeed_pp.registry import rule_named
from mindspeed_pp.rule import Context, Rule
from mindspeed_pp.simulator import Costs, Course, simulate
from mindspeed_pp.stage_times import Measured, Times

CANDIDATES = ("zbv", "zbi", "zb-h1", "interleaved", "1f1b")


def compared(
    candidates: Iterable[Rule],
    ranks: int,
    chunks: int,
    microbatches: int,
    costs: Costs,
    measured: Measured | None = None,
) -> list[tuple[Rule, Course | str]]:
    """Return the course of each schedule for given sizes, or why it does not go with them.

    Args:
        candidates: schedules.
        ranks: pipeline ranks.
        chunks: of each rank, for schedules that have several.
        microbatches: of a step.
        costs: times of the parts.
        measured: times of stages in place of those.
    """
    found: list[tuple[Rule, Course | str]] = []
    for rule in candidates:
        number = rule.chunks or max(2, chunks)
        refused = rule.refusal(ranks, number, microbatches)
        if refused:
            found.append((rule, refused))
            continue
        times = costs.forward, costs.input_gradient, costs.weight_gradient
        schedule = rule.schedule(Context(ranks, number, microbatches, times))
        of_rule = costs
        if measured is not None:
            stages = measured.of_stages(schedule.placement)
            of_rule = replace(costs, stages=stages, message=costs.message or measured.message)
        found.append((rule, simulate(schedule, of_rule)))
    return found


@lru_cache(maxsize=64)
def shortest(
    ranks: int,
    chunks: int | None,
    layers: int | None,
    microbatches: int | None,
    times: Times,
    splits: bool,
    measured: Measured | None = None,
) -> str:
    """Return the name of the schedule with the shortest step; of equals that with the lowest peak.

    Args:
        ranks: pipeline ranks.
        chunks: of each rank, None where nobody says.
        layers: of the model, None where nobody says.
        microbatches: of a step, None where that is not known yet.
        times: of ``F``, ``B`` and ``W`` of a rank's whole share.
        splits: weight gradients may come apart.
        measured: times of stages in place of ``times``.
    """
    wanted = []
    for name in CANDIDATES:
        rule = rule_named(name)
        if rule.splits and not splits:
            continue
        if chunks is None:
            goes = rule.chunks == 1 or (rule.chunks == 2 and layers is not None and layers % (2 * ranks) == 0)
        else:
            goes = rule.chunks in (None, chunks) and not (rule.chunks is None and chunks < 2)
        if goes:
            wanted.append(rule)
    costs = Costs(*times)
    found = compared(wanted, ranks, chunks or 2, microbatches or 4 * ranks, costs, measured)
    courses = [
        (course.makespan, max(course.peaks), rule.name)
        for rule, course in found
        if isinstance(course, Course)
    ]
    best = min(courses, key=lambda each: (round(each[0], 9), round(each[1], 9)), default=(0.0, 0.0, "1f1b"))
    return best[2]

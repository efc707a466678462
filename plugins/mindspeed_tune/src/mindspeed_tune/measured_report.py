"""Measured times in the report of a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.flags.flag_set import known_flags
from mindspeed_core.registry import Registry
from mindspeed_tune.candidate import Candidate
from mindspeed_tune.journal import Journal
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.measure import (
    Measured,
    Measuring,
    check_one_node,
    check_processors,
    equal,
    ranked_by_time,
)
from mindspeed_tune.search_report import rank_correlation


def measured_report(
    report: Mapping[str, Any],
    *,
    folder: Path | None,
    trials: int,
    limit: float,
    memory: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the best layouts of a report, and return it with their times and in their order.

    Args:
        report: of a search.
        folder: of a journal; None keeps nothing.
        trials: layouts that are measured.
        limit: seconds after which a run hangs.
        memory: measure the peak of memory too.
        say: takes lines about the progress.

    Raises:
        UserError: nothing trains here, there are more ranks than processors, or they are of several nodes.
    """
    command = read_command(report["command"])
    check_one_node(command)
    busy = check_processors(command.world_size)
    candidates = [Candidate(row["settings"]) for row in report["top"][:trials]]
    facts = {"measured command": list(report["command"]), "ranks": command.world_size}
    with Journal(folder, facts) as journal:
        flags = known_flags(Registry.discover())
        measuring = Measuring(command, flags, journal, limit=limit, say=say)
        found = measuring.halve(candidates, memory=memory)
    if all(one.failure for one in found.values()):
        raise UserError(f"no layout trains here: {next(iter(found.values())).failure}")
    order, no_order = ranked_by_time(found)
    rows = {row["name"]: _with_times(row, found.get(row["name"])) for row in report["top"]}
    names = order if not no_order else [row["name"] for row in report["top"] if row["name"] in order]
    for name in names:
        rows[name]["equal_to_the_first"] = name != names[0] and equal(found[name], found[names[0]])
    rest = [row["name"] for row in report["top"] if row["name"] not in found]
    top = [rows[name] for name in (*names, *rest)]
    pairs = [(rows[name]["seconds"], found[name].best) for name in order]
    errors = sorted(abs(predicted / taken - 1) for predicted, taken in pairs)
    return {
        **report,
        "start": top[0]["start"],
        "top": [{**row, "lost_by": None if row is top[0] else _lost(row, top[0])} for row in top],
        "no_order_by_time": no_order,
        "infeasible": {name: one.failure for name, one in found.items() if one.failure},
        "prediction": {
            "compared": len(pairs),
            "median_error": errors[len(errors) // 2],
            "rank_correlation": rank_correlation(pairs),
        },
        "notes": [*report["notes"], *filter(None, [busy])],
    }


def _with_times(row: Mapping[str, Any], run: Measured | None) -> dict[str, Any]:
    if run is None:
        return dict(row)
    return {**row, "measured": run.best, "spread": run.spread, "load": run.load, "measured_peak": run.peak}


def _lost(row: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    more = {name: value - first["terms"][name] for name, value in row["terms"].items()}
    name = max(more, key=more.__getitem__)
    return {"term": name, "seconds": more[name]}

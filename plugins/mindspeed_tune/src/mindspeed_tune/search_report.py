"""The report of a search as data: what to start, what came next, and how far the numbers can be trusted."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mindspeed_core.flags.flag_set import FlagSet
from mindspeed_tune.candidate import Candidate
from mindspeed_tune.estimate import PLANNED
from mindspeed_tune.launch_command import TRAIN, LaunchCommand
from mindspeed_tune.measure import Measured, equal, ranked_by_time
from mindspeed_tune.ranked import Ranked
from mindspeed_tune.search import SHOWN, Search
from mindspeed_tune.tuned_features import Tried

FORMAT = 1
_GIB = 2.0**30


def report_of(
    search: Search, features: Sequence[Tried] = (), measured: Mapping[str, Measured] | None = None
) -> dict[str, Any]:
    """Return the report of a search that is done.

    Args:
        search: with its ranking.
        features: values of features' flags that were tried on the best layout.
        measured: short runs by candidate; None where none were asked for.
    """
    order, no_order = _order(search, measured or {})
    best = order[0]
    return {
        "format": FORMAT,
        "command": list(search.command.text),
        "ranks": search.command.world_size,
        "ranks_per_node": search.per_node,
        "hardware": search.hardware.name,
        "unverified": list(search.hardware.unverified),
        "start": start_command(search.command, best.candidate, search.flags),
        "counts": {
            "valid": len(search.ranked) + len(search.unranked),
            "composed": sum(one.composed is not None for one in search.ranked.values()),
            "planned": sum(one.estimate.source == PLANNED for one in search.ranked.values()),
            "refused": sum(one.count for one in search.validity.refused.values()),
            "unranked": len(search.unranked),
        },
        "top": [_row(search, one, best, measured or {}) for one in order[:SHOWN]],
        "no_order_by_time": no_order,
        "pareto": [
            {"name": one.candidate.label, "seconds": one.estimate.seconds, "needed": one.estimate.needed}
            for one in search.frontier()
        ],
        "one_gib_more": _with_more_memory(search, best),
        "one_node_more": _with_another_node(search, best),
        "composition": _composition(search),
        "prediction": _prediction(order, measured or {}),
        "features": [{**asdict(one), "value": str(one.value)} for one in features],
        "refused": [
            asdict(one) for one in sorted(search.validity.refused.values(), key=lambda one: -one.count)
        ],
        "unranked": _grouped(search.unranked),
        "only_measured": _only_measured(search, measured or {}),
        "infeasible": {name: one.failure for name, one in (measured or {}).items() if one.failure},
        "notes": list(dict.fromkeys(search.notes)),
    }


def start_command(command: LaunchCommand, candidate: Candidate, flags: FlagSet) -> str:
    """Return the command line that starts a candidate."""
    arguments = list(candidate.arguments(command.arguments, flags))
    words = list(command.text)
    given = list(command.arguments)
    planned = any(word.partition("=")[0] == "--fake-world-size" for word in words)
    if given and words[-len(given) :] == given and not planned:
        return shlex.join([*words[: -len(given)], *arguments])
    per_node = command.ranks_per_node or command.world_size
    nodes = max(1, command.world_size // per_node)
    launcher = [
        "torchrun",
        "--nnodes",
        str(nodes),
        "--nproc-per-node",
        str(min(per_node, command.world_size)),
    ]
    started = ["-m", "mindspeed_core.train"] if command.kind == TRAIN else [command.target]
    return shlex.join([*launcher, *started, *arguments])


def _only_measured(search: Search, measured: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """Return the candidates that no dry run plans, with their measured steps, the fastest first."""
    found = [(one, measured[one.name]) for one in search.only_measured if one.name in measured]
    return [
        {
            "name": one.label,
            "measured": run.best,
            "spread": run.spread,
            "start": start_command(search.command, one, search.flags),
        }
        for one, run in sorted(found, key=lambda pair: pair[1].best)
        if not run.failure
    ]


def _order(search: Search, measured: Mapping[str, Measured]) -> tuple[list[Ranked], str]:
    """Return the ranking: what was measured first, by its times unless they tell nothing."""
    predicted = [one for one in search.best() if not getattr(measured.get(one.candidate.name), "failure", "")]
    by_time, no_order = ranked_by_time(measured)
    if not by_time and search.hardware.untrusted:
        no_order = f"the numbers of {search.hardware.path} are not to be trusted: {search.hardware.untrusted}"
    if no_order or not by_time:
        return predicted, no_order
    by_name = {one.candidate.name: one for one in predicted}
    first = [by_name[name] for name in by_time if name in by_name]
    return [*first, *(one for one in predicted if one not in first)], ""


def _row(search: Search, one: Ranked, best: Ranked, measured: Mapping[str, Measured]) -> dict[str, Any]:
    estimate, run = one.estimate, measured.get(one.candidate.name)
    first = measured.get(best.candidate.name)
    tied = run is not None and first is not None and run is not first and equal(run, first)
    return {
        "name": one.candidate.name,
        "label": one.candidate.label,
        "settings": dict(one.candidate.settings),
        "start": start_command(search.command, one.candidate, search.flags),
        "seconds": estimate.seconds,
        "measured": None if run is None else run.best,
        "spread": None if run is None else run.spread,
        "load": None if run is None else run.load,
        "measured_peak": None if run is None else run.peak,
        "equal_to_the_first": tied,
        "mfu": estimate.mfu,
        "exact": estimate.exact,
        "needed": estimate.needed,
        "categories": dict(estimate.categories),
        "terms": estimate.terms,
        "bubble": estimate.bubble,
        "source": estimate.source,
        "lost_by": _largest_term(one, best),
    }


def _largest_term(one: Ranked, best: Ranked) -> dict[str, Any] | None:
    """Return the term in which a candidate loses most against the best one."""
    if one is best:
        return None
    more = {name: value - best.estimate.terms[name] for name, value in one.estimate.terms.items()}
    name = max(more, key=more.__getitem__)
    return {"term": name, "seconds": more[name]}


def _with_more_memory(search: Search, best: Ranked) -> dict[str, Any] | None:
    """Return the fastest candidate that another GiB would let fit; None where it brings nothing."""
    memory = search.hardware.memory + _GIB
    fitting = [one for one in search.ranked.values() if not one.estimate.problems or _only_memory(one)]
    fastest = min(
        (one for one in fitting if one.estimate.fits(memory)),
        key=lambda one: (one.estimate.seconds, one.candidate.name),
    )
    if fastest.estimate.seconds >= best.estimate.seconds:
        return None
    return {"name": fastest.candidate.label, "saves": 1 - fastest.estimate.seconds / best.estimate.seconds}


def _only_memory(one: Ranked) -> bool:
    return all(" do not fit into " in problem for problem in one.estimate.problems)


def _with_another_node(search: Search, best: Ranked) -> dict[str, Any] | None:
    """Return the fastest candidate with another node, by composition; None where none divides."""
    from mindspeed_tune.small_pipeline import NotComposable

    world = search.command.world_size + search.per_node
    found = None
    for candidate in search.candidates(world):
        args = search.validity.plan_args(candidate, world)
        if args is None or search.trust.why_not(candidate):
            continue
        try:
            estimate = search.compose(candidate, args, world)
        except NotComposable:
            continue
        if estimate.fits(search.hardware.memory) and (found is None or estimate.seconds < found[1].seconds):
            found = (candidate, estimate)
    if found is None:
        return None
    candidate, estimate = found
    return {
        "ranks": world,
        "name": candidate.label,
        "seconds": estimate.seconds,
        "faster": best.estimate.seconds / estimate.seconds,
    }


def _composition(search: Search) -> dict[str, Any]:
    """Return how far composed numbers were from those of the candidates' own dry runs."""
    found = list(search.trust.compared.values())
    cells = dict(search.trust.as_json(one.candidate for one in search.ranked.values() if one.composed))
    if not found:
        return {"compared": 0, **cells}
    return {
        "compared": len(found),
        "bytes": {"median": _median(one.bytes for one in found), "most": max(abs(o.bytes) for o in found)},
        "seconds": {
            "median": _median(one.seconds for one in found),
            "most": max(abs(o.seconds) for o in found),
        },
        "within": sum(one.agrees for one in found),
        **cells,
    }


def _prediction(order: Sequence[Ranked], measured: Mapping[str, Measured]) -> dict[str, Any] | None:
    """Return how far predicted steps were from measured ones; None without measurements."""
    pairs = [
        (one.estimate.seconds, measured[one.candidate.name].best)
        for one in order
        if one.candidate.name in measured and measured[one.candidate.name].seconds
    ]
    if not pairs:
        return None
    return {
        "compared": len(pairs),
        "median_error": _median(abs(p / m - 1) for p, m in pairs),
        "rank_correlation": rank_correlation(pairs),
    }


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation of pairs of numbers; None for fewer than three pairs."""
    if len(pairs) < 3:
        return None
    first, second = (_ranks([pair[index] for pair in pairs]) for index in (0, 1))
    return statistics.correlation(first, second) if len({*first}) > 1 and len({*second}) > 1 else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of every value; equal ones share the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def _median(values: Iterable[float]) -> float:
    return statistics.median(abs(value) for value in values)


def _grouped(reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    found: dict[str, int] = {}
    for reason in reasons.values():
        found[reason] = found.get(reason, 0) + 1
    return [{"reason": reason, "count": count} for reason, count in found.items()]

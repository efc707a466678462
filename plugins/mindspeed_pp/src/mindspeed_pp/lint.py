"""Checks of a schedule before anything is built for it: complete, on the right ranks, free of cycles.

Dependencies follow from the actions, so a schedule cannot get them wrong; it can only order a rank's list so
that ranks wait for each other in a circle.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspeed_core.errors import UserError
from mindspeed_pp.actions import (
    BACKWARD,
    FORWARD,
    GATHER,
    INPUT_GRADIENT,
    RECOMPUTE,
    REDUCE,
    SWAP_IN,
    SWAP_OUT,
    WEIGHT_GRADIENT,
)
from mindspeed_pp.channels import look_ahead
from mindspeed_pp.schedule import Result, Schedule, needs, provides

_NAMES = {FORWARD: "F", INPUT_GRADIENT: "B (or A)", WEIGHT_GRADIENT: "W (or A)"}


@dataclass(frozen=True)
class Findings:
    """Findings about a schedule.

    Attributes:
        look_ahead: receives that have to be posted at once, by channel ``(from, to)``.
        peaks: most micro-batches alive on each rank, in units of the rank's whole share of layers.
    """

    look_ahead: dict[tuple[int, int], int]
    peaks: tuple[float, ...]


def lint(schedule: Schedule, memory_limit: float | None = None) -> Findings:
    """Check a schedule.

    Args:
        schedule: to check.
        memory_limit: most micro-batches alive on a rank.

    Raises:
        UserError: it cannot run; the message names the first actions that are wrong, or the shortest circle.
    """
    problems = [
        *schedule.placement.problems(),
        *_misplaced(schedule),
        *_incomplete(schedule),
        *_out_of_order(schedule),
    ]
    if not problems:
        problems = list(_circle(schedule))
    peaks = tuple(_peak(schedule, rank) for rank in range(schedule.ranks)) if not problems else ()
    if memory_limit is not None:
        problems += [
            f"rank {rank} keeps {peak:g} micro-batches alive, and the limit is {memory_limit:g}"
            for rank, peak in enumerate(peaks)
            if peak > memory_limit + 1e-9
        ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(f"schedule {schedule.name}: {'; '.join(problems[:3])}{more}")
    return Findings(look_ahead(schedule), peaks)


def _misplaced(schedule: Schedule) -> Iterator[str]:
    placement, stages = schedule.placement, schedule.placement.stages
    if schedule.ranks != placement.size:
        yield f"there are {schedule.ranks} lists for {placement.size} ranks"
    for rank, order in enumerate(schedule.orders):
        for at, action in enumerate(order):
            for part in action.flat():
                if part.stage >= stages or part.microbatch >= schedule.microbatches:
                    yield (
                        f"rank {rank}, item {at}: {part} is beyond stage {stages - 1} or micro-batch "
                        f"{schedule.microbatches - 1}"
                    )
                elif placement.ranks[part.stage] != rank:
                    yield (
                        f"rank {rank}, item {at}: {part} belongs to rank "
                        f"{placement.ranks[part.stage]}, which holds stage {part.stage}"
                    )


def _results(schedule: Schedule) -> Counter[Result]:
    return Counter(
        result
        for order in schedule.orders
        for action in order
        for part in action.flat()
        for result in provides(part)
    )


def _incomplete(schedule: Schedule) -> Iterator[str]:
    counts = _results(schedule)
    for stage in range(schedule.placement.stages):
        for i in range(schedule.microbatches):
            for op, name in _NAMES.items():
                found, wanted = counts[op, stage, i], int(schedule.placement.owns(stage, i))
                if found != wanted:
                    instead = "once" if wanted else "never"
                    place = f"stage {stage} and micro-batch {i}"
                    yield f"{name} of {place} comes {found} times instead of {instead}"
            if counts[RECOMPUTE, stage, i] > 1:
                yield f"R{stage}.{i} comes {counts[RECOMPUTE, stage, i]} times"
            for op in (SWAP_OUT, SWAP_IN):
                if counts[op, stage, i] > 1:
                    yield f"{op}{stage}.{i} comes {counts[op, stage, i]} times"
            if counts[SWAP_OUT, stage, i] != counts[SWAP_IN, stage, i]:
                there, lacking = (SWAP_OUT, SWAP_IN) if counts[SWAP_OUT, stage, i] else (SWAP_IN, SWAP_OUT)
                yield f"{there}{stage}.{i} comes without {lacking}{stage}.{i}"
            if counts[SWAP_OUT, stage, i] and counts[RECOMPUTE, stage, i]:
                yield f"R{stage}.{i} computes again what SO{stage}.{i} sends to the host; keep one of the two"
        for op in (REDUCE, GATHER):
            if counts[op, stage, 0] > 1:
                yield f"{op}{stage} comes {counts[op, stage, 0]} times"


def _out_of_order(schedule: Schedule) -> Iterator[str]:
    """Refuse reductions before the last gradient of their stage, and gathering after the first use."""
    for rank, order in enumerate(schedule.orders):
        seen: dict[tuple[str, int], int] = {}
        for at, action in enumerate(order):
            for part in action.flat():
                if part.op in (WEIGHT_GRADIENT, BACKWARD):
                    seen[WEIGHT_GRADIENT, part.stage] = seen.get((WEIGHT_GRADIENT, part.stage), 0) + 1
                    if part.op == BACKWARD:
                        seen[f"A{part.microbatch}", part.stage] = 1
                elif part.op == FORWARD:
                    seen[FORWARD, part.stage] = at
                elif part.op == REDUCE and seen.get((WEIGHT_GRADIENT, part.stage), 0) < sum(
                    schedule.placement.owns(part.stage, i) for i in range(schedule.microbatches)
                ):
                    yield f"rank {rank}, item {at}: {part} comes before the last gradient of its weights"
                elif part.op == SWAP_OUT and seen.get((f"A{part.microbatch}", part.stage)):
                    yield f"rank {rank}, item {at}: {part} sends away what its backward pass used up"
                elif part.op == GATHER and (FORWARD, part.stage) in seen:
                    yield f"rank {rank}, item {at}: {part} comes after a forward pass of its stage"


def _circle(schedule: Schedule) -> Sequence[str]:
    """Run the lists; where nothing goes on, say who waits for whom in the shortest circle."""
    done: set[Result] = set()
    at = [0] * schedule.ranks

    def missing(rank: int) -> list[Result]:
        action = schedule.orders[rank][at[rank]]
        made = {result for part in action.flat() for result in provides(part)}
        return [
            need
            for part in action.flat()
            for need in needs(part, schedule)
            if need not in done and need not in made
        ]

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order) and not missing(rank):
                done.update(result for part in order[at[rank]].flat() for result in provides(part))
                at[rank] += 1
                moved = True
    stuck = [rank for rank, order in enumerate(schedule.orders) if at[rank] < len(order)]
    if not stuck:
        return ()
    positions = {
        result: (rank, position, str(action))
        for rank, order in enumerate(schedule.orders)
        for position, action in enumerate(order)
        for part in action.flat()
        for result in provides(part)
    }
    waits = {rank: [positions[need] for need in missing(rank)] for rank in stuck}
    ranks = min((_shortest(waits, rank) for rank in stuck), key=len)
    said = []
    for rank, following in zip(ranks, (*ranks[1:], ranks[0])):
        other, position, name = next(place for place in waits[rank] if place[0] == following)
        behind = schedule.orders[other][at[other]]
        where = (
            "which is itself" if (other, position) == (rank, at[rank]) else f"item {position} of rank {other}"
        )
        said.append(
            f"rank {rank} waits at item {at[rank]} ({schedule.orders[rank][at[rank]]}) for {name}, {where}"
            + (f" behind {behind}" if position != at[other] else "")
        )
    return ("ranks wait in a circle: " + ", ".join(said),)


def _shortest(waits: dict[int, list[tuple[int, int, str]]], start: int) -> list[int]:
    """Return the shortest way of waiting from a rank back to itself; all ranks where there is none."""
    paths = deque([[start]])
    seen: set[int] = set()
    while paths:
        path = paths.popleft()
        for other, _, _ in waits.get(path[-1], ()):
            if other == start:
                return path
            if other not in seen:
                seen.add(other)
                paths.append([*path, other])
    return [start] * (len(waits) + 1)


def _peak(schedule: Schedule, rank: int) -> float:
    """Return the most micro-batches alive, each until the gradient of its weights."""
    share = 1 / schedule.placement.parts(rank)
    alive = peak = 0
    for action in schedule.orders[rank]:
        for part in action.flat():
            again = (part.stage, part.microbatch) in schedule.recomputed
            if part.op == RECOMPUTE or (part.op == FORWARD and not again):
                alive += 1
            peak = max(peak, alive)
            if part.op in (WEIGHT_GRADIENT, BACKWARD, SWAP_OUT):
                alive -= 1
            if part.op == SWAP_IN:
                alive += 1
                peak = max(peak, alive)
    return peak * share

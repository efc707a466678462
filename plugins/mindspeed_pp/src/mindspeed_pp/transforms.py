"""Schedules made of other schedules."""

from __future__ import annotations

from collections import deque

from mindspeed_pp.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    SWAP_IN,
    SWAP_OUT,
    WEIGHT_GRADIENT,
    Action,
)
from mindspeed_pp.placement import Placement
from mindspeed_pp.schedule import Result, Schedule, made, needs, provides
from mindspeed_pp.simulator import Costs, simulate


def waves(name: str, placement: Placement, microbatches: int) -> Schedule:
    """Return a schedule that any placement and any number of micro-batches go with.

    All micro-batches forward stage by stage, then backward: every other schedule is faster. It takes over
    where a batch is too small for the one that was asked for, and in evaluation.
    """
    of = [[i for i in range(microbatches) if placement.owns(s, i)] for s in range(placement.stages)]
    orders = [
        [
            *(Action(FORWARD, stage, i) for stage in held for i in of[stage]),
            *(Action(BACKWARD, stage, i) for stage in reversed(held) for i in of[stage]),
        ]
        for held in placement.held
    ]
    return made(name, placement, microbatches, orders)


def greedy_weights(schedule: Schedule, costs: Costs, limit: float | None = None) -> Schedule:
    """Move the weight gradients of a schedule to where a rank would wait, by the times of its parts.

    The order of all other actions stays, so that no rank begins a forward pass in the way of a backward pass.
    Where that is no shorter, the schedule comes back as it is.

    Args:
        schedule: that computes weight gradients apart.
        costs: times of its parts.
        limit: most micro-batches alive on a rank, each until its weight gradient; that of the schedule
            without it.
    """
    ranks = schedule.placement.ranks
    todo = [deque(a for a in order if a.op != WEIGHT_GRADIENT) for order in schedule.orders]
    allowed = [
        _most_alive(order) if limit is None else limit * _chunks(schedule, r)
        for r, order in enumerate(schedule.orders)
    ]
    waiting: list[deque[Action]] = [deque() for _ in todo]
    orders: list[list[Action]] = [[] for _ in todo]
    alive, free = [0] * len(todo), [0.0] * len(todo)
    done: dict[Result, float] = {}

    def start(rank: int) -> float | None:
        at = free[rank]
        action = todo[rank][0]
        own = {result for part in action.flat() for result in provides(part)}
        for part in action.flat():
            for need in needs(part, schedule):
                if need in own:
                    continue
                if need not in done:
                    return None
                at = max(at, done[need] + (costs.message if ranks[need[1]] != rank else 0.0))
        return at

    def run(rank: int, action: Action, at: float) -> None:
        end = at + costs.of(action, _chunks(schedule, rank))
        orders[rank].append(action)
        free[rank] = end
        for part in action.flat():
            done.update(dict.fromkeys(provides(part), end))
            alive[rank] += {FORWARD: 1, WEIGHT_GRADIENT: -1, BACKWARD: -1}.get(part.op, 0)
            if part.op == INPUT_GRADIENT:
                waiting[rank].append(Action(WEIGHT_GRADIENT, part.stage, part.microbatch))

    while any(todo):
        starts = {rank: at for rank in range(len(todo)) if todo[rank] and (at := start(rank)) is not None}
        rank = min(starts, key=lambda r: (starts[r], r))
        action, at = todo[rank][0], starts[rank]
        weights = waiting[rank]
        full = action.op == FORWARD and alive[rank] >= allowed[rank]
        if weights and (full or free[rank] + costs.of(weights[0], _chunks(schedule, rank)) <= at + 1e-9):
            run(rank, weights.popleft(), free[rank])
            continue
        run(rank, todo[rank].popleft(), at)
    for order, weights in zip(orders, waiting):
        order.extend(weights)
    moved = made(schedule.name, schedule.placement, schedule.microbatches, orders)
    before, after = (simulate(each, costs).makespan for each in (schedule, moved))
    return moved if after < before else schedule


def _chunks(schedule: Schedule, rank: int) -> int:
    return schedule.placement.parts(rank)


def _most_alive(order: tuple[Action, ...]) -> float:
    alive = most = 0
    for action in order:
        for part in action.flat():
            alive += {FORWARD: 1, WEIGHT_GRADIENT: -1, BACKWARD: -1}.get(part.op, 0)
            most = max(most, alive)
    return most


def recomputed(schedule: Schedule) -> Schedule:
    """Return the schedule with forward passes computed again, each right before its backward pass.

    So a rank computes while the gradient is on its way, and keeps the input of a stage in between. A forward
    pass whose backward pass follows at once keeps what it computes.
    """

    def with_recompute(order: tuple[Action, ...]) -> list[Action]:
        found: list[Action] = []
        for action in order:
            if action.op in (INPUT_GRADIENT, BACKWARD):
                before = found[-1] if found else None
                if before is None or (before.op, before[1:3]) != (FORWARD, action[1:3]):
                    found.append(Action(RECOMPUTE, action.stage, action.microbatch))
            found.append(action)
        return found

    return made(
        schedule.name, schedule.placement, schedule.microbatches, [with_recompute(o) for o in schedule.orders]
    )


AHEAD = 2
"""Actions between the way back from the host and what needs it."""


def swapped_operands(schedule: Schedule) -> Schedule:
    """Return the schedule with operands of late weight gradients on the host in between.

    They leave right behind ``B`` and come back two actions before ``W``; those whose ``W`` comes sooner stay.
    """

    def with_swaps(order: tuple[Action, ...]) -> list[Action]:
        at = {(a.stage, a.microbatch): n for n, a in enumerate(order) if a.op == WEIGHT_GRADIENT}
        behind: dict[int, Action] = {}
        before: dict[int, list[Action]] = {}
        for n, action in enumerate(order):
            place = action.stage, action.microbatch
            if action.op == INPUT_GRADIENT and at[place] - n > AHEAD + 1:
                behind[n] = Action(SWAP_OUT, *place)
                before.setdefault(at[place] - AHEAD, []).append(Action(SWAP_IN, *place))
        found: list[Action] = []
        for n, action in enumerate(order):
            found += [*before.get(n, ()), action]
            if n in behind:
                found.append(behind[n])
        return found

    return made(
        schedule.name, schedule.placement, schedule.microbatches, [with_swaps(o) for o in schedule.orders]
    )

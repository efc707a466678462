"""Messages between pipeline ranks, their order, and the check that transfers cannot block each other.

A channel is an ordered pair of ranks. Everything that travels from one to the other, activations and
gradients, uses it in the order of the sender's list. Two groups of ranks suffice for all channels: a pair of
ranks uses one of them in one direction and the other one in the opposite direction, so that no communicator
ever carries transfers of both directions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from mindspeed_pp.actions import BACKWARD, FORWARD, INPUT_GRADIENT, Action
from mindspeed_pp.schedule import Schedule, needs, provides


class Message(NamedTuple):
    """Tensors of one micro-batch between two stages.

    Attributes:
        kind: ``F`` activations to the stage behind, ``B`` gradients to the stage before.
        stage: that receives them.
        microbatch: index within the step.
    """

    kind: str
    stage: int
    microbatch: int


def sent(action: Action, schedule: Schedule) -> Iterator[tuple[Message, int]]:
    """Yield the messages that an action ends with, and the rank that each goes to; to itself none."""
    placement = schedule.placement
    ranks = placement.ranks
    for part in action.flat():
        to = None
        if part.op == FORWARD and not placement.is_last(part.stage):
            to = Message(FORWARD, part.stage + 1, part.microbatch)
        elif part.op in (INPUT_GRADIENT, BACKWARD) and not placement.is_first(part.stage):
            to = Message(INPUT_GRADIENT, part.stage - 1, part.microbatch)
        if to is not None and ranks[to.stage] != ranks[part.stage]:
            yield to, ranks[to.stage]


def received(action: Action, schedule: Schedule) -> Iterator[tuple[Message, int]]:
    """Yield the messages that an action needs, and the rank that each comes from; from itself none."""
    placement = schedule.placement
    ranks = placement.ranks
    for part in action.flat():
        if part.op == FORWARD and not placement.is_first(part.stage):
            origin = part.stage - 1
            message = Message(FORWARD, part.stage, part.microbatch)
        elif part.op in (INPUT_GRADIENT, BACKWARD) and not placement.is_last(part.stage):
            origin = part.stage + 1
            message = Message(INPUT_GRADIENT, part.stage, part.microbatch)
        else:
            continue
        if ranks[origin] != ranks[part.stage]:
            yield message, ranks[origin]


def messages(schedule: Schedule) -> dict[tuple[int, int], list[Message]]:
    """Return what every channel ``(from, to)`` carries, in the order of the sender."""
    found: dict[tuple[int, int], list[Message]] = {}
    for rank, order in enumerate(schedule.orders):
        for action in order:
            for message, to in sent(action, schedule):
                found.setdefault((rank, to), []).append(message)
    return found


def look_ahead(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Return how many receives of each channel have to be posted at once.

    More than one only where the receiver wants messages in another order than they are sent in.
    """
    positions = {
        (rank, to, message): at
        for (rank, to), sequence in messages(schedule).items()
        for at, message in enumerate(sequence)
    }
    depth: dict[tuple[int, int], int] = {}
    got: dict[tuple[int, int], set[int]] = {}
    for rank, order in enumerate(schedule.orders):
        for action in order:
            for message, origin in received(action, schedule):
                channel = origin, rank
                arrived = got.setdefault(channel, set())
                at = positions[origin, rank, message]
                waiting = at + 1 - sum(position < at for position in arrived)
                depth[channel] = max(depth.get(channel, 1), waiting)
                arrived.add(at)
    return depth


def goes_up(origin: int, to: int, ranks: int) -> bool:
    """Return which of the two groups carries a channel; the opposite channel is in the other one."""
    distance = (to - origin) % ranks
    return origin < to if 2 * distance == ranks else 2 * distance < ranks


def stuck(schedule: Schedule, *, directed: bool = True, ahead: int = 0) -> str:
    """Play a schedule with transfers that block each other, as communicators of devices do.

    A communicator of two ranks works in the order in which each of them posted, and a transfer takes place
    only when both sides have reached it. Sends are posted behind the computation and do not block their
    rank; a rank waits for its receives.

    Args:
        schedule: that passed `lint`.
        directed: each direction of a pair of ranks has a communicator of its own; otherwise they share one.
        ahead: receives of each channel that are posted before they are needed.

    Returns:
        An empty string, or where it came to a stop.
    """
    streams: dict[tuple[int, int], tuple[deque[Message], deque[Message]]] = {}
    posted: dict[tuple[int, int], deque[Message]] = {
        channel: deque(sequence) for channel, sequence in messages(schedule).items()
    }
    arrived: set[Message] = set()
    done: set[tuple[str, int, int]] = set()
    at = [0] * schedule.ranks
    waiting: list[set[Message]] = [set() for _ in range(schedule.ranks)]

    def stream(origin: int, to: int, rank: int) -> deque[Message]:
        key = (origin, to) if directed else (min(origin, to), max(origin, to))
        ends = streams.setdefault(key, (deque(), deque()))
        return ends[rank == key[1]]

    def post(origin: int, rank: int, until: Message | None) -> None:
        todo, expected = posted.get((origin, rank), deque()), waiting[rank]
        while todo and (
            until not in expected and until not in arrived
            if until is not None
            else sum(m not in arrived for m in expected if _origin(m, schedule) == origin) < ahead
        ):
            message = todo.popleft()
            expected.add(message)
            stream(origin, rank, rank).append(message)

    def step(rank: int) -> bool:
        order = schedule.orders[rank]
        if at[rank] == len(order):
            return False
        action = order[at[rank]]
        wanted = list(received(action, schedule))
        for message, origin in wanted:
            post(origin, rank, message)
        if any(message not in arrived for message, _ in wanted):
            return False
        made = {result for part in action.flat() for result in provides(part)}
        local = {need for part in action.flat() for need in needs(part, schedule)} - made
        if any(need not in done and schedule.placement.ranks[need[1]] == rank for need in local):
            return False
        done.update(made)
        for message, to in sent(action, schedule):
            stream(rank, to, rank).append(message)
        at[rank] += 1
        for origin in range(schedule.ranks):
            post(origin, rank, None)
        return True

    def transfer() -> bool:
        moved = False
        for one, other in streams.values():
            while one and other and one[0] == other[0]:
                arrived.add(one.popleft())
                other.popleft()
                moved = True
        return moved

    while True:
        moved = False
        for rank in range(schedule.ranks):
            while step(rank):
                moved = True
        if not (transfer() or moved):
            break
    held = [rank for rank in range(schedule.ranks) if at[rank] < len(schedule.orders[rank])]
    return ", ".join(f"rank {r} at item {at[r]} ({schedule.orders[r][at[r]]})" for r in held)


def _origin(message: Message, schedule: Schedule) -> int:
    return schedule.placement.ranks[message.stage + (-1 if message.kind == FORWARD else 1)]

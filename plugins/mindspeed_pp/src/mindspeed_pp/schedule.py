"""A schedule: the actions of every pipeline rank in their order, what depends on what, and its text form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mindspeed_core.errors import UserError
from mindspeed_pp.actions import (
    BACKWARD,
    COMPUTING,
    FORWARD,
    GATHER,
    INPUT_GRADIENT,
    OVERLAPPED,
    RECOMPUTE,
    SWAP_IN,
    SWAP_OUT,
    WEIGHT_GRADIENT,
    Action,
    parse_action,
)
from mindspeed_pp.placement import Placement

if TYPE_CHECKING:
    from pathlib import Path


Orders = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """Actions of every pipeline rank in one step.

    Attributes:
        name: of the rule that made it.
        placement: where the stages are.
        microbatches: of a step.
        orders: the actions of each rank, in the order in which it executes them.
    """

    name: str
    placement: Placement
    microbatches: int
    orders: Orders

    @property
    def ranks(self) -> int:
        """Return the number of pipeline ranks."""
        return len(self.orders)

    @cached_property
    def splits(self) -> bool:
        """Return whether weight gradients are computed apart from those of inputs."""
        return any(part.op == INPUT_GRADIENT for order in self.orders for a in order for part in a.flat())

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """Return the stages and micro-batches whose forward pass is computed again."""
        return frozenset(
            (part.stage, part.microbatch)
            for order in self.orders
            for action in order
            for part in action.flat()
            if part.op == RECOMPUTE
        )

    @cached_property
    def swapped(self) -> dict[tuple[int, int], str]:
        """Return of the stages and micro-batches that go to the host what needs them back, ``B`` or ``W``."""
        found: dict[tuple[int, int], str] = {}
        for order in self.orders:
            seen: set[tuple[int, int]] = set()
            for action in order:
                for part in action.flat():
                    place = part.stage, part.microbatch
                    if part.op in (INPUT_GRADIENT, BACKWARD):
                        seen.add(place)
                    elif part.op == SWAP_OUT:
                        found[place] = WEIGHT_GRADIENT if place in seen else INPUT_GRADIENT
        return found

    def text(self) -> str:
        """Return the file form, which `read_schedule` reads."""
        lines = [
            f"schedule {self.name}",
            f"ranks {' '.join(map(str, self.placement.ranks))}",
            f"microbatches {self.microbatches}",
        ]
        if self.placement.copies > 1:
            lines.append(f"copies {self.placement.copies}")
        lines += [f"{rank}: {' '.join(map(str, order))}" for rank, order in enumerate(self.orders)]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Return the notation of ``torch.distributed.pipelining``: a line per rank, ``0F3,2I0,2W0``.

        ``I`` is the gradient of the input and ``B`` a whole backward pass there.
        """
        letters = {INPUT_GRADIENT: "I", BACKWARD: "B"}
        return "".join(
            ",".join(
                _bracketed([f"{a.stage}{letters.get(a.op, a.op)}{a.microbatch}" for a in action.flat()])
                for action in order
                if action.op == OVERLAPPED or action.op in COMPUTING
            )
            + "\n"
            for order in self.orders
        )

    @cached_property
    def digest(self) -> str:
        """Return a number of the whole content, the same on every rank that made the same schedule."""
        import hashlib

        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def forward_only(self) -> Schedule:
        """Return the forward passes alone, for evaluation."""
        orders = tuple(
            tuple(part for action in order for part in action.flat() if part.op in (FORWARD, GATHER))
            for order in self.orders
        )
        return Schedule(self.name, self.placement, self.microbatches, orders)


def _bracketed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({';'.join(parts)})OVERLAP_F_B"


Result = tuple[str, int, int]
"""Kind, stage and micro-batch; a whole backward pass makes ``B`` and ``W``, other actions what they are."""


def needs(action: Action, schedule: Schedule) -> Iterator[Result]:
    """Yield the results that an action needs.

    Args:
        action: any but `OVERLAPPED`, whose parts have their own needs.
        schedule: that it belongs to.
    """
    placement = schedule.placement
    op, stage, microbatch = action.op, action.stage, action.microbatch
    swapped = schedule.swapped.get((stage, microbatch))
    if (op in (INPUT_GRADIENT, BACKWARD) and swapped == INPUT_GRADIENT) or (op == swapped == WEIGHT_GRADIENT):
        yield SWAP_IN, stage, microbatch
    if op == FORWARD and not placement.is_first(stage):
        yield FORWARD, stage - 1, microbatch
    elif op in (INPUT_GRADIENT, BACKWARD):
        yield RECOMPUTE if (stage, microbatch) in schedule.recomputed else FORWARD, stage, microbatch
        if not placement.is_last(stage):
            yield INPUT_GRADIENT, stage + 1, microbatch
    elif op == WEIGHT_GRADIENT:
        yield INPUT_GRADIENT, stage, microbatch
    elif op == RECOMPUTE:
        yield FORWARD, stage, microbatch
    elif op == SWAP_OUT:
        yield INPUT_GRADIENT if swapped == WEIGHT_GRADIENT else FORWARD, stage, microbatch
    elif op == SWAP_IN:
        yield SWAP_OUT, stage, microbatch


def provides(action: Action) -> tuple[Result, ...]:
    """Return the results of an action."""
    op, stage, microbatch = action.op, action.stage, action.microbatch
    if op == BACKWARD:
        return (INPUT_GRADIENT, stage, microbatch), (WEIGHT_GRADIENT, stage, microbatch)
    return ((op, stage, microbatch),)


def parse_schedule(text: str, where: str = "schedule") -> Schedule:
    """Read the file form of a schedule.

    Args:
        text: see `Schedule.text`; ``#`` begins a comment.
        where: the file, for messages.

    Raises:
        UserError: a line cannot be read; the message names it.
    """
    from pathlib import Path

    name, microbatches, copies = "", 0, 1
    ranks: tuple[int, ...] = ()
    orders: dict[int, tuple[Action, ...]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            if words[0] == "schedule" and len(words) == 2:
                name = words[1]
            elif words[0] == "ranks":
                ranks = tuple(int(word) for word in words[1:])
            elif words[0] == "microbatches" and len(words) == 2:
                microbatches = int(words[1])
            elif words[0] == "copies" and len(words) == 2 and int(words[1]) > 0:
                copies = int(words[1])
            elif words[0].endswith(":") and int(words[0][:-1]) not in orders:
                orders[int(words[0][:-1])] = tuple(parse_action(word) for word in words[1:])
            else:
                raise ValueError("neither schedule, ranks, microbatches, copies nor the list of another rank")
        except (ValueError, UserError) as error:
            raise UserError(f"{where}, line {number}: {error}; it looks like '0: F0.0 F0.1 A0.0'") from error
    if not ranks or not microbatches or sorted(orders) != list(range(max(ranks, default=-1) + 1)):
        raise UserError(
            f"{where}: a schedule has a line 'ranks' with the rank of each stage, a line 'microbatches' and "
            "one list for each rank from 0 on"
        )
    if len(ranks) % copies:
        raise UserError(
            f"{where}: {len(ranks)} stages are no {copies} copies of a model; change one of the two"
        )
    return Schedule(
        name or Path(where).stem,
        Placement(ranks, copies),
        microbatches,
        tuple(orders[r] for r in sorted(orders)),
    )


def read_schedule(path: Path) -> Schedule:
    """Read a schedule file.

    Raises:
        UserError: the file cannot be read, or holds none.
    """
    return parse_schedule(schedule_text(path), str(path))


def schedule_text(path: Path) -> str:
    """Return the text of a schedule file.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); name a schedule file") from error


def made(name: str, placement: Placement, microbatches: int, orders: Sequence[Sequence[Action]]) -> Schedule:
    """Return a schedule of lists."""
    return Schedule(name, placement, microbatches, tuple(tuple(order) for order in orders))

"""Experts change their ranks: one weight of all slots of a layer at a time, through bounded buffers.

All moving experts of a layer are cut at the same places, and a cut is exchanged before the next one is read:
so that an expert may move to where another one leaves, and a buffer never holds more than it is allowed to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_moe.expert_map.planning import Placement
from mindspeed_moe.expert_map.slots import Part, Slot

BUFFER_BYTES = 256 * 2**20
"""Most bytes that a rank sends, or receives, at once."""

Parts = Callable[[torch.nn.Parameter], Sequence[Part]]
"""The parts that move of a parameter; as many tensors, known or not, on every rank."""


class Moves:
    """Messages of one rank between two placements.

    Attributes:
        outgoing: slots to send, by rank.
        incoming: slots to fill, by rank.
        most: most experts that any rank sends or receives.
    """

    def __init__(self, before: Placement, after: Placement, rank: int, *, all_of_them: bool = False) -> None:
        """Compare two placements.

        Args:
            before: the experts of each rank.
            after: likewise.
            rank: this one.
            all_of_them: also those that stay where they are.
        """
        source = {
            expert: (owner, slot)
            for owner, experts in enumerate(before)
            for slot, expert in enumerate(experts)
        }
        ranks = len(before)
        self.outgoing: list[list[int]] = [[] for _ in range(ranks)]
        self.incoming: list[list[int]] = [[] for _ in range(ranks)]
        moving = [0] * ranks
        for target, experts in enumerate(after):
            for slot, expert in enumerate(experts):
                owner, old = source[expert]
                if (owner, old) == (target, slot) and not all_of_them:
                    continue
                # A placement is a permutation: as many experts come as go.
                moving[target] += 1
                if owner == rank:
                    self.outgoing[target].append(old)
                if target == rank:
                    self.incoming[owner].append(slot)
        self.most = max(moving)


@torch.no_grad()
def migrate(
    kinds: Sequence[Sequence[Slot]],
    moves: Moves,
    parts: Parts,
    group: dist.ProcessGroup,
    *,
    into: Parts | None = None,
) -> None:
    """Exchange the experts of one layer; collective over the ranks that hold them, and their copies.

    Args:
        kinds: the slots of this rank, for every weight.
        moves: of this rank.
        parts: what moves of a parameter.
        group: the ranks that experts are spread over.
        into: where it arrives; by default where it was.
    """
    if not moves.most:
        return
    for kind in kinds:
        read = {slot.parameter: list(parts(slot.parameter)) for slot in kind}
        write = read if into is None else {slot.parameter: list(into(slot.parameter)) for slot in kind}
        width = sum(len(part.tensors) for part in read[kind[0].parameter])
        for first, end in _cuts(kind[0].length, moves.most * width * 4, BUFFER_BYTES):
            sent = [_read(kind[slot], read, first, end) for rank in moves.outgoing for slot in rank]
            device = kind[0].parameter.device
            rows = torch.stack(sent) if sent else torch.zeros(0, width, end - first, device=device)
            _complete(rows, read[kind[0].parameter])
            arrived = torch.empty(
                sum(map(len, moves.incoming)), width, end - first, dtype=rows.dtype, device=device
            )
            dist.all_to_all_single(
                arrived,
                rows,
                [len(slots) for slots in moves.incoming],
                [len(slots) for slots in moves.outgoing],
                group=group,
            )
            for values, slot in zip(arrived, (slot for rank in moves.incoming for slot in rank)):
                _write(kind[slot], write, first, end, values)


def _cuts(length: int, bytes_of_each: int, limit: int) -> Iterator[tuple[int, int]]:
    step = max(1, limit // bytes_of_each)
    for first in range(0, length, step):
        yield first, min(first + step, length)


def _read(slot: Slot, parts: dict[torch.nn.Parameter, list[Part]], first: int, end: int) -> Tensor:
    """Return float32 ``[tensors, elements]``, zero where other ranks hold them."""
    of_all = [(part, tensor) for part in parts[slot.parameter] for tensor in part.tensors]
    values = torch.zeros(len(of_all), end - first, device=slot.parameter.device)
    for row, (part, tensor) in zip(values, of_all):
        here, there = _overlap(slot, part, tensor, first, end)
        if tensor is not None:
            row[here] = tensor[there].to(row.dtype)
    return values


def _write(
    slot: Slot, parts: dict[torch.nn.Parameter, list[Part]], first: int, end: int, values: Tensor
) -> None:
    of_all = [(part, tensor) for part in parts[slot.parameter] for tensor in part.tensors]
    for row, (part, tensor) in zip(values, of_all):
        here, there = _overlap(slot, part, tensor, first, end)
        if tensor is not None:
            tensor[there] = row[here].to(tensor.dtype)


def _overlap(slot: Slot, part: Part, tensor: Tensor | None, first: int, end: int) -> tuple[slice, slice]:
    """Return the elements of a cut that a part holds: where in the cut, and where in the part."""
    begin = slot.first + first
    low = max(begin, part.first)
    high = max(low, min(slot.first + end, part.first + (0 if tensor is None else tensor.numel())))
    return slice(low - begin, high - begin), slice(low - part.first, high - part.first)


def _complete(rows: Tensor, parts: Sequence[Part]) -> None:
    """Add what the other ranks of a distributed optimizer hold, ``[experts, tensors, elements]``."""
    if not rows.shape[0]:
        # The ranks that hold the same experts send as many.
        return
    first = 0
    for part in parts:
        end = first + len(part.tensors)
        if part.group is not None and part.group.size() > 1:
            held = rows[:, first:end].contiguous()
            dist.all_reduce(held, group=part.group)
            rows[:, first:end] = held
        first = end

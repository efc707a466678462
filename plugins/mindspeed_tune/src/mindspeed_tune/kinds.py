"""Kinds of ranks: which ranks of a launch are equal, and which ones have to be run to know them all.

Sizes do not depend on a rank's coordinate in tensor, context, expert or data parallelism, except for what
remains of an uneven division, which the far end of a group shows. What differs is the pipeline stage: its
layers, its embedding or head, and how many micro-batches it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_core.errors import UserError
from mindspeed_tune.layout import Layout
from mindspeed_tune.rank_lists import RankList
from mindspeed_tune.record import RankRecord, Stage


@dataclass(frozen=True)
class Kind:
    """Ranks that keep, compute and communicate the same.

    Attributes:
        name: for a reader: ``first stage``, ``stages 1 to 14``.
        stages: pipeline ranks of this kind.
        ranks: all ranks of the first of them.
        count: number of ranks of all of them.
        representative: the rank that stands for them.
    """

    name: str
    stages: tuple[int, ...]
    ranks: RankList
    count: int
    representative: int


def kinds_of(layout: Layout, stages: Sequence[Stage]) -> list[Kind]:
    """Return the kinds of ranks, by first pipeline stage.

    Stages with the same contents are one kind: the first of them holds the most micro-batches.
    """
    alike: dict[Stage, list[int]] = {}
    for number, stage in enumerate(stages):
        alike.setdefault(stage, []).append(number)
    return [_kind(layout, numbers) for numbers in sorted(alike.values())]


def _kind(layout: Layout, numbers: list[int]) -> Kind:
    representative = layout.rank({"pp": numbers[0]})
    ranks = layout.group(representative, ("tp", "cp", "ep", "dp"))
    if len(numbers) == 1:
        name = f"stage {numbers[0]}"
    elif numbers == list(range(numbers[0], numbers[-1] + 1)):
        name = f"stages {numbers[0]} to {numbers[-1]}"
    else:
        name = "stages " + ", ".join(map(str, numbers))
    if layout.pp == 1:
        name = "all ranks"
    return Kind(name, tuple(numbers), ranks, len(numbers) * layout.world_size // layout.pp, representative)


def stage_partners(layout: Layout, kinds: Sequence[Kind]) -> list[int]:
    """Return ranks whose messages with the representatives show that neighbouring stages agree.

    One pair of neighbouring stages for every pair of kinds that are neighbours, and the two ends of the
    pipeline, which share the embedding.
    """
    kind_of = {stage: index for index, kind in enumerate(kinds) for stage in kind.stages}
    wanted: dict[int, None] = {}
    seen: set[tuple[int, int]] = set()
    for stage in range(layout.pp - 1):
        pair = (kind_of[stage], kind_of[stage + 1])
        if pair not in seen:
            seen.add(pair)
            wanted |= dict.fromkeys((stage, stage + 1))
    return [layout.rank({"pp": stage}) for stage in wanted]


def group_partners(record: RankRecord, known: Sequence[int], checked: set[tuple[str, str]]) -> list[int]:
    """Return further ranks, so that every kind of call of a rank is compared with another member's.

    Args:
        record: of the rank.
        known: ranks that are recorded anyway.
        checked: pairs of group name and operation that are compared already; grows.
    """
    found: list[int] = []
    for index, group in enumerate(record.groups):
        operations = {call.operation for call in record.calls if call.group == index}
        pairs = {(group.name, operation) for operation in operations}
        if group.ranks.size == 1 or not pairs - checked:
            continue
        checked |= pairs
        others = [rank for rank in (*known, *found) if rank != record.rank and rank in group.ranks]
        if not others:
            # The far end: what an uneven division leaves shows there.
            last = group.ranks.last
            found.append(last if last != record.rank else group.ranks[0])
    return found


def chosen_ranks(text: str, world_size: int) -> list[int]:
    """Return the ranks of ``--plan-ranks LIST``: ``0,8,128`` or ``0:1024:128``.

    Raises:
        UserError: names what is no rank of the world.
    """
    found: dict[int, None] = {}
    for part in text.split(","):
        numbers = part.strip().split(":")
        if not all(number.isdecimal() for number in numbers) or not 1 <= len(numbers) <= 3:
            raise UserError(
                f"--plan-ranks {text}: {part.strip()!r} is no rank; give kinds, all, ranks as in 0,8,128, or "
                "start:stop:stride"
            )
        values = [int(number) for number in numbers]
        if len(values) == 3 and values[2] == 0:
            raise UserError(f"--plan-ranks {text}: the stride of {part.strip()!r} is 0; give at least 1")
        ranks = range(values[0], values[0] + 1) if len(values) == 1 else range(*values)
        found |= dict.fromkeys(ranks)
    outside = [rank for rank in found if rank >= world_size]
    if outside or not found:
        problem = f"rank {outside[0]} is not in" if outside else "names no rank of"
        raise UserError(
            f"--plan-ranks {text}: {problem} a world of {world_size} ranks; they are 0 to {world_size - 1}"
        )
    return sorted(found)

"""Order of passes in the interleaved schedule, and which of them drop what they compute; no torch.

A pass is a model chunk of the rank and a micro-batch. A table lists passes forward, as megatron-core's
``get_schedule_table`` does: pairs of micro-batch and chunk. Backward the chunks come in the opposite order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Pass(NamedTuple):
    """A micro-batch through a model chunk of the rank."""

    chunk: int
    microbatch: int


class Event(NamedTuple):
    """A pass, forward or backward."""

    of: Pass
    forward: bool


def backwards(table: Sequence[tuple[int, int]], chunks: int) -> list[Pass]:
    """Return backward passes in their order.

    Args:
        table: micro-batch and chunk of each forward pass.
        chunks: of the rank.
    """
    return [Pass(chunks - 1 - chunk, microbatch) for microbatch, chunk in table]


def received(table: Sequence[tuple[int, int]], chunks: int, *, last_rank: bool) -> list[Pass]:
    """Return the passes whose gradients another rank sends, in the order in which they are received.

    Args:
        table: micro-batch and chunk of each forward pass.
        chunks: of the rank.
        last_rank: the loss is computed behind its last chunk.
    """
    return [one for one in backwards(table, chunks) if not (last_rank and one.chunk == chunks - 1)]


def events(table: Sequence[tuple[int, int]], chunks: int, warmup: int) -> list[Event]:
    """Return all passes of a rank in their order: forward alone, by turns, backward alone.

    Args:
        table: micro-batch and chunk of each forward pass.
        chunks: of the rank.
        warmup: forward passes before the first backward pass.
    """
    ahead = [Event(Pass(chunk, microbatch), True) for microbatch, chunk in table]
    behind = [Event(one, False) for one in backwards(table, chunks)]
    found = ahead[:warmup]
    for forward, backward in zip(ahead[warmup:], behind):
        found += [forward, backward]
    return found + behind[len(table) - warmup :]


def warmup_passes(ranks: int, rank: int, chunks: int, group: int, passes: int) -> int:
    """Return how many forward passes a rank computes before its first backward pass.

    Args:
        ranks: of the pipeline.
        rank: within it.
        chunks: of each rank.
        group: micro-batches that pass a chunk one after the other.
        passes: forward passes in all.
    """
    return min(2 * (ranks - rank - 1) + (chunks - 1) * group, passes)


def most_alive(order: Sequence[Event], dropped: frozenset[Pass] = frozenset()) -> int:
    """Return the largest number of passes whose activations are alive at once.

    Those of a pass that drops them live from their second computation on, right before its backward pass.
    """
    alive = most = 0
    for event in order:
        drops = event.of in dropped
        alive += event.forward != drops
        most = max(most, alive)
        alive -= not event.forward
    return most


def passes_to_drop(order: Sequence[Event], limit: int) -> frozenset[Pass]:
    """Return the passes that drop their activations so that at most ``limit`` are alive at once.

    Whenever there would be one more, the living one whose backward pass is latest drops its own.

    Args:
        order: of a rank, see `events`.
        limit: at least 1.
    """
    ends = {event.of: place for place, event in enumerate(order) if not event.forward}
    dropped: set[Pass] = set()
    while True:
        crowd = _first_crowd(order, dropped, limit)
        if not crowd:
            return frozenset(dropped)
        dropped.add(max(crowd, key=lambda one: ends[one]))


def _first_crowd(order: Sequence[Event], dropped: set[Pass], limit: int) -> list[Pass]:
    """Return the passes alive, and able to drop, where there are too many for the first time."""
    alive: set[Pass] = set()
    for event in order:
        again = not event.forward and event.of in dropped
        if event.forward and event.of not in dropped:
            alive.add(event.of)
        if len(alive) + again > limit:
            return sorted(alive)
        if not event.forward:
            alive.discard(event.of)
    return []

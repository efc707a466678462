"""The ends of the documents of a sequence: found in tokens or positions, or of a given length."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from mindspeed_megatron import equal_blocks


def ends_by_token(tokens: Tensor, last: int) -> list[tuple[int, ...]]:
    """Return the running ends of every sample's documents; what follows the last end is a document too.

    A dry run has no tokens: there every sample is one document, which takes attention longest.

    Args:
        tokens: ``[b, s]``.
        last: the token that documents end with, and that belongs to them.
    """
    length = tokens.shape[1]
    if equal_blocks.are_unknown():
        return [(length,)] * len(tokens)
    found = [(row == last).nonzero().flatten().tolist() for row in tokens.cpu()]
    return [_closed((place + 1 for place in row), length) for row in found]


def ends_by_position(position_ids: Tensor) -> list[tuple[int, ...]]:
    """Return the same from positions ``[b, s]`` that begin with 0 in every document."""
    length = position_ids.shape[1]
    if equal_blocks.are_unknown():
        return [(length,)] * len(position_ids)
    found = [(row == 0).nonzero().flatten().tolist() for row in position_ids.cpu()]
    return [_closed((place for place in row if place), length) for row in found]


def ends_by_length(length: int, every: int) -> tuple[int, ...]:
    """Return the running ends of documents of equal length, the last one with what is left."""
    return _closed(range(every, length, every), length)


def restarted(length: int, ends: tuple[int, ...], like: Tensor) -> Tensor:
    """Return positions ``[s]`` that begin with 0 in every document, with dtype and device of ``like``."""
    positions = like.new_tensor(range(length))
    starts = like.new_tensor((0, *ends[:-1]))
    lengths = like.new_tensor([end - start for start, end in zip((0, *ends), ends)])
    return positions - starts.repeat_interleave(lengths)


def _closed(ends: Iterable[int], length: int) -> tuple[int, ...]:
    found = tuple(ends)
    return found if found and found[-1] == length else (*found, length)

"""Packed sequences that end before their tensors: lists of ends that trail with zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_kernels.attention.arguments import Options, numbers, sequence_ends, trailing_zeros


@dataclass(frozen=True)
class Cut:
    """The tokens and ends that take part.

    Attributes:
        queries: leading ones.
        keys: leading ones.
        ends: both lists by argument, without trailing zeros.
    """

    queries: int
    keys: int
    ends: dict[str, list[int]]


def cut_at_ends(options: Options, query: Tensor, key: Tensor) -> Cut | None:
    """Return what takes part of packed queries and keys ``[t, n, d]``; None when all of it does.

    Raises:
        ContractError: ends do not fit the tensors.
    """
    if options.layout != "TND" or options.actual_seq_qlen is None or options.actual_seq_kvlen is None:
        return None
    given = numbers(options.actual_seq_qlen), numbers(options.actual_seq_kvlen)
    if not trailing_zeros(*given) or not (query.shape[0] or key.shape[0]):
        return None
    query_ends, key_ends = sequence_ends(options, query.shape[0], key.shape[0])
    ends = {"actual_seq_qlen": query_ends or [0], "actual_seq_kvlen": key_ends or [0]}
    return Cut(ends["actual_seq_qlen"][-1], ends["actual_seq_kvlen"][-1], ends)


def padded(results: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Add rows that saw nothing to a context ``[t, n, d]``, a maximum and a sum ``[t, n, 8]``."""
    fills = (0.0, torch.finfo(results[1].dtype).min, 0.0)
    return [
        torch.cat((part, part.new_full((tokens - part.shape[0], *part.shape[1:]), fill)))
        for part, fill in zip(results, fills)
    ]

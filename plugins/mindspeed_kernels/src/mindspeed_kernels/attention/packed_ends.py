"""Packed sequences that end before their tensors: lists of ends that trail with zeros.

The tokens behind the last end take no part. They are cut off before an implementation sees them, because the
kernels of devices leave their results unwritten, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.attention.arguments import Options, numbers, options_of, sequence_ends, trailing_zeros

Function = Callable[..., tuple[Any, ...]]
_OF_ROWS = ("softmax_max", "softmax_sum", "attention_in")


def used_ends(options: Options, query: Tensor, key: Tensor) -> dict[str, list[int]]:
    """Return both lists of ends by argument without trailing zeros; empty when there are none.

    Raises:
        ContractError: ends do not fit the tensors ``[t, n, d]``.
    """
    if options.layout != "TND" or options.actual_seq_qlen is None or options.actual_seq_kvlen is None:
        return {}
    given = numbers(options.actual_seq_qlen), numbers(options.actual_seq_kvlen)
    if not trailing_zeros(*given) or not (query.shape[0] or key.shape[0]):
        return {}
    query_ends, key_ends = sequence_ends(options, query.shape[0], key.shape[0])
    return {"actual_seq_qlen": query_ends or [0], "actual_seq_kvlen": key_ends or [0]}


def at_ends(function: Function) -> Function:
    """Let an implementation of attention see the tokens that take part; the others get a context of zero."""

    @wraps(function)
    def attend(
        query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **given: Any
    ) -> tuple[Any, ...]:
        ends = used_ends(options_of(head_num, input_layout, **given), query, key)
        if not ends:
            return function(query, key, value, head_num, input_layout, **given)
        last = ends["actual_seq_kvlen"][-1]
        used = query[: ends["actual_seq_qlen"][-1]], key[:last], value[:last]
        context, maximum, total, *others = function(*used, head_num, input_layout, **{**given, **ends})
        rows = query.shape[0]
        lowest = torch.finfo(maximum.dtype).min
        return (
            _lengthened(context, rows),
            _lengthened(maximum, rows, lowest),
            _lengthened(total, rows),
            *others,
        )

    return attend


def gradients_at_ends(function: Function) -> Function:
    """Let an implementation of the gradients see the tokens that take part; the others get zeros."""

    @wraps(function)
    def differentiate(
        query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **given: Any
    ) -> tuple[Any, ...]:
        given_ends = given.get("actual_seq_qlen"), given.get("actual_seq_kvlen")
        options = Options(
            head_num, input_layout, actual_seq_qlen=given_ends[0], actual_seq_kvlen=given_ends[1]
        )
        ends = used_ends(options, query, key)
        if not ends:
            return function(query, key, value, dy, head_num, input_layout, **given)
        rows, last = ends["actual_seq_qlen"][-1], ends["actual_seq_kvlen"][-1]
        facts = {name: given[name][:rows] for name in _OF_ROWS}
        used = query[:rows], key[:last], value[:last], dy[:rows]
        found = function(*used, head_num, input_layout, **{**given, **facts, **ends})
        sizes = query.shape[0], key.shape[0], key.shape[0]
        return (*(_lengthened(part, size) for part, size in zip(found, sizes)), *found[3:])

    return differentiate


def _lengthened(part: Tensor, rows: int, fill: float = 0.0) -> Tensor:
    return torch.cat((part, part.new_full((rows - part.shape[0], *part.shape[1:]), fill)))

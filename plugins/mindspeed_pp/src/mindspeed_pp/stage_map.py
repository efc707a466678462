"""Layers of each pipeline stage, from any of the flags that say it, as megatron-core's layout.

Layers are numbered without gaps whatever the flags leave out: checkpoints are those of the dense model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError
from mindspeed_pp.asked import said_chunks

if TYPE_CHECKING:
    from mindspeed_pp.placement import Placement


NOOP, ROWS, LIST = "--noop-layers", "--pipeline-num-transformer-layers", "--num-layer-list"
_TOKEN = re.compile(r"\s*(\d+|[\[\],*])")
Rows = list[list[int]]


def parse_rows(text: str) -> Rows:
    """Read ``[[0,1],[1,1]*4,[1,0]]``: a row per rank, a column per chunk; ``*n`` repeats what stands before.

    Raises:
        ArgumentError: it is no list of lists of numbers.
    """
    tokens, at = [], 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _no_rows(text)
        tokens.append(match[1])
        at = match.end()
    value, end = _value(tokens, 0, text)
    if end != len(tokens) or not isinstance(value, list) or not value:
        raise _no_rows(text)
    if not all(isinstance(row, list) and row and all(isinstance(n, int) for n in row) for row in value):
        raise _no_rows(text)
    return value


def _value(tokens: Sequence[str], at: int, text: str) -> tuple[Any, int]:
    if at >= len(tokens):
        raise _no_rows(text)
    if tokens[at].isdigit():
        return int(tokens[at]), at + 1
    if tokens[at] != "[":
        raise _no_rows(text)
    items: list[Any] = []
    at += 1
    while at < len(tokens) and tokens[at] != "]":
        item, at = _value(tokens, at, text)
        times = 1
        if at + 1 < len(tokens) and tokens[at] == "*" and tokens[at + 1].isdigit():
            times, at = int(tokens[at + 1]), at + 2
        if times > 10_000:
            raise _no_rows(text)
        items += [item] * times
        if at < len(tokens) and tokens[at] == ",":
            at += 1
        elif at >= len(tokens) or tokens[at] != "]":
            raise _no_rows(text)
    if at >= len(tokens):
        raise _no_rows(text)
    return items, at + 1


def _no_rows(text: str) -> ArgumentError:
    return ArgumentError(
        ROWS, text, "is no list of rows", "give a row for each pipeline rank, as [[0,1],[1,1]*4,[1,0]]"
    )


def numbers(flag: str, text: str) -> list[int]:
    """Read numbers between commas.

    Raises:
        ArgumentError: something else stands there.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(
            flag, text, "is no list of numbers", "write numbers between commas, as 0,5"
        ) from None
    if min(found) < 0:
        raise ArgumentError(flag, text, f"{min(found)} is below 0", "write numbers from 0 on")
    return found


def layers_of_stages(args: Any) -> tuple[list[int], int]:
    """Return the number of layers of each stage in the order of the model, and that of the whole model.

    Args:
        args: before validation; one of the three flags is given.

    Raises:
        ArgumentError: the flag does not go with the sizes of the model and its pipeline.
    """
    from mindspeed_pp.placement import loop
    from mindspeed_pp.plan import planned

    ranks = args.pipeline_model_parallel_size or 1
    chunks = said_chunks(args) or 1
    plan = planned(args)
    # Copies of the model are cut alike: each rank holds one stage of each.
    several = plan is not None and plan.placement.copies == 1
    placement = plan.placement if plan is not None and several else loop(ranks, chunks)
    if getattr(args, "noop_layers", None):
        return _without_noops(args, placement)
    if getattr(args, "num_layer_list", None):
        rows = [[count] for count in numbers(LIST, args.num_layer_list)]
        flag, text = LIST, args.num_layer_list
    else:
        flag, text = ROWS, args.pipeline_num_transformer_layers
        rows = parse_rows(text)
    if len(rows) != ranks:
        reason = f"has {len(rows)} {'rows' if flag == ROWS else 'numbers'} for {ranks} pipeline ranks"
        raise ArgumentError(flag, text, reason, f"give {ranks}")
    for row in rows:
        if len(row) != placement.stages // placement.size:
            reason = f"has a row of {len(row)} for {placement.stages // placement.size} chunks of each rank"
            raise ArgumentError(flag, text, reason, "give a number for each chunk")
    total = sum(map(sum, rows))
    if total != args.num_layers:
        raise ArgumentError(
            flag, text, f"has {total} layers, and --num-layers is {args.num_layers}", "make them equal"
        )
    return [rows[rank][placement.chunk(stage)] for stage, rank in enumerate(placement.ranks)], total


def _without_noops(args: Any, placement: Placement) -> tuple[list[int], int]:
    text, positions = args.noop_layers, args.num_layers
    left_out = numbers(NOOP, text)
    if len(set(left_out)) != len(left_out):
        raise ArgumentError(NOOP, text, "names a position twice", "name each position once")
    if max(left_out) >= positions:
        reason = f"{max(left_out)} is beyond the last of the {positions} positions of --num-layers"
        raise ArgumentError(NOOP, text, reason, f"use 0 to {positions - 1}")
    if len(left_out) == positions:
        raise ArgumentError(NOOP, text, "leaves no layer at all", "leave some positions out")
    if positions % placement.stages:
        reason = f"the {positions} positions of --num-layers are not divisible by {placement.stages} stages"
        raise ArgumentError(NOOP, text, reason, f"use a multiple of {placement.stages}")
    each = positions // placement.stages
    counts = [
        sum(position not in left_out for position in range(stage * each, (stage + 1) * each))
        for stage in range(placement.stages)
    ]
    return counts, positions - len(left_out)


def layout_text(layers: Sequence[int], predictions: int = 0) -> str:
    """Return megatron-core's text of a layout, ``Et|tt|tL``.

    Args:
        layers: of each stage, in the order of the model.
        predictions: further tokens that the last stage predicts.
    """
    stages = ["t" * count for count in layers]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * predictions + "L"
    return "|".join(stages)

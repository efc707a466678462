"""Micro-batches of different numbers of samples: which flags say the list, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_pp.actions import A, Action, F
from mindspeed_pp.asked import LIST_FLAG, MANUAL_FLAG, ORDERS_FLAG
from mindspeed_pp.lint import lint
from mindspeed_pp.rule import Context, Rule

EXAMPLES: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "example-config-1": (4, (1, 2, 3, 4, *(5,) * 9, 4, 3, 2)),
    "example-config-2": (8, (1, 2, 2, 3, 4, *(5,) * 13, 4, 4, 3, 3, 3, 2)),
}
"""AscendSpeed's lists by name: pipeline ranks, and samples of each micro-batch."""


def parse_sizes(flag: str, text: str) -> tuple[int, ...]:
    """Read samples of micro-batches, ``1,2,3`` or ``[1, 2, 3]``.

    Raises:
        ArgumentError: something else stands there.
    """
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    try:
        sizes = tuple(int(part) for part in inner.split(","))
    except ValueError:
        raise ArgumentError(
            flag, text, "is no list of numbers", "write samples between commas, as 1,2,3,2"
        ) from None
    if min(sizes) < 1:
        raise ArgumentError(flag, text, "has a micro-batch without samples", "use numbers from 1 on")
    return sizes


def given_list(args: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return the flag that says the list, and the list; None where none does.

    Raises:
        UserError: the list cannot be read, or is said twice.
    """
    listed, manual = getattr(args, "optimized_mbs_list", None), getattr(args, "manual_mbs", None)
    if listed and manual:
        raise UserError(
            f"{LIST_FLAG} {listed} and {MANUAL_FLAG} {manual} both say the sizes of micro-batches; keep one"
        )
    if listed:
        return LIST_FLAG, parse_sizes(LIST_FLAG, listed)
    if not manual:
        return None
    if manual not in EXAMPLES:
        return MANUAL_FLAG, parse_sizes(MANUAL_FLAG, manual)
    ranks, sizes = EXAMPLES[manual]
    if (getattr(args, "pipeline_model_parallel_size", 1) or 1) != ranks:
        raise ArgumentError(
            MANUAL_FLAG,
            manual,
            f"is for {ranks} pipeline ranks, and there are {args.pipeline_model_parallel_size}",
            f"use --pipeline-model-parallel-size {ranks}, or write a list",
        )
    return MANUAL_FLAG, sizes


def sizes_of(args: Any) -> tuple[int, ...]:
    """Return the samples of each micro-batch of a step; empty where all have ``--micro-batch-size``."""
    given = given_list(args)
    if given is None or not getattr(args, "optimized_mbs_mode", True):
        return ()
    return given[1]


def check_sum(flag: str, sizes: tuple[int, ...], batch: int) -> None:
    """Refuse a list that is not the batch of a data-parallel rank.

    Args:
        flag: that says the list.
        sizes: samples of each micro-batch.
        batch: samples of a data-parallel rank in a step.

    Raises:
        ArgumentError: the sum is another number.
    """
    if sum(sizes) != batch:
        raise ArgumentError(
            flag,
            ",".join(map(str, sizes)),
            f"has {sum(sizes)} samples, and --global-batch-size gives each data-parallel rank {batch}",
            "make them equal",
        )


def rule_of_orders(text: str, ranks: int) -> Rule:
    """Return the schedule in ``--pp-schedule-list``.

    Args:
        text: JSON, ``{"stage0": ["F0", "F1", "B0", "B1"], "stage1": [...]}``; ``B`` is a whole backward pass.
        ranks: of the pipeline.

    Raises:
        UserError: it is none, one for other ranks, or one that cannot run.
    """
    way_out = 'write {"stage0": ["F0", "B0"], "stage1": ["F0", "B0"]}, a list for each pipeline rank'
    try:
        read = json.loads(text)
        orders = tuple(
            tuple(_action(item, rank) for item in read[f"stage{rank}"]) for rank in range(len(read))
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ArgumentError(
            ORDERS_FLAG, text, "is no JSON with a list of passes for each stage", way_out
        ) from None
    if len(orders) != ranks:
        raise ArgumentError(
            ORDERS_FLAG, text, f"has {len(orders)} stages for {ranks} pipeline ranks", way_out
        )
    rule = Rule(
        name="pp-schedule-list",
        build=lambda context: orders,
        exactly=sum(action.op == "F" for action in orders[0]),
        summary=f"of {ORDERS_FLAG}",
    )
    lint(rule.schedule(Context(ranks, 1, rule.exactly or 0)))
    return rule


def _action(item: str, stage: int) -> Action:
    make = {"F": F, "B": A}[item[0]]
    return make(stage, int(item[1:]))

"""Measure the precision of key gradients after a ring of many ranks, in bfloat16.

The ring's own executor runs, each rank a thread of this process and every transfer a copy, so that 32 ranks
need no 32 processes.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_cp.engine import ring
from mindspeed_cp.engine.layout import zigzag
from mindspeed_cp.engine.local import work_with
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import Grid
from mindspeed_cp.engine.ring_table import Move, ring_table
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.options import CPOptions

LENGTH, WIDTH, SCALE = 4096, 64, 0.125
RANKS = (2, 4, 8, 16, 32)
_LONGEST_WAIT = 120.0


class Mail:
    """Copies on their way between threads."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[Any, ...], queue.Queue[Tensor]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()

    def box(self, *address: Any) -> queue.Queue[Tensor]:
        with self.lock:
            return self.boxes[address]


class MailedTransfers:
    """`mindspeed_cp.engine.ring.Transfers` between threads."""

    mail = Mail()

    def __init__(self, plan: ring.RingPlan, what: str) -> None:
        self.me, self.what = plan.rank, what
        self.due: dict[int, list[tuple[Move, Tensor]]] = defaultdict(list)

    def post(self, moves: Sequence[Move], sending: dict[int, Tensor], receiving: dict[int, Tensor]) -> None:
        for move in moves:
            if move.source == self.me:
                self.mail.box(self.what, move.block, move.target, move.arrive).put(
                    sending[move.block].clone()
                )
            if move.target == self.me:
                self.due[move.arrive].append((move, receiving[move.block]))

    def wait(self, step: int) -> None:
        for move, buffer in self.due.pop(step, ()):
            box = self.mail.box(self.what, move.block, move.target, move.arrive)
            buffer.copy_(box.get(timeout=_LONGEST_WAIT))


def key_gradient_error(ranks: int, *, wide: bool) -> float:
    """Relative error of the gradients of all keys, against float64."""
    rule, layout = MaskRule(LENGTH), zigzag(LENGTH, ranks)
    torch.manual_seed(0)
    exact = [torch.randn(1, 1, LENGTH, WIDTH, dtype=torch.float64) for _ in range(4)]
    rounded = [tensor.bfloat16() for tensor in exact]
    query, key, value, outer = (tensor.double() for tensor in rounded)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    scores = (query @ key.transpose(-1, -2) * SCALE).masked_fill(
        torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), float("-inf")
    )
    (torch.softmax(scores, -1) @ value).backward(outer)
    found: dict[int, Tensor] = {}
    chosen = Scores(SCALE, rule)

    def one(rank: int) -> None:
        chunks = layout.chunks(rank)
        work = tuple(
            work_with([(slice(0, 1), chosen)], chunks, layout.chunks(block)) for block in range(ranks)
        )
        options = CPOptions(Grid(ranks), wide_gradients=wide)
        plan = ring.RingPlan(ring_table(ranks), rank, layout.lengths, work, None, options)  # type: ignore[arg-type]
        position = torch.from_numpy(layout.positions(rank))
        mine = [tensor[:, :, position] for tensor in rounded]
        inputs = [tensor.requires_grad_() for tensor in mine[:3]]
        output = ring.RingAttention.apply(*inputs, plan)
        output.backward(mine[3])
        found[rank] = inputs[1].grad

    MailedTransfers.mail = Mail()
    whole = ring.Transfers
    ring.Transfers = MailedTransfers  # type: ignore[misc, assignment]
    try:
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ring.Transfers = whole  # type: ignore[misc]
    gathered = torch.cat([found[rank] for rank in range(ranks)], 2).double()
    expected = key.grad[:, :, torch.from_numpy(layout.order)]
    return float((gathered - expected).norm() / expected.norm())


def precision() -> list[dict[str, Any]]:
    """Errors by number of ranks, with gradients that travel in float32 and in bfloat16."""
    rows = []
    for ranks in RANKS:
        wide, narrow = (key_gradient_error(ranks, wide=wide) for wide in (True, False))
        rows.append({"ranks": ranks, "travelling_float32": wide, "travelling_bfloat16": narrow})
    for row in rows:
        for name in ("travelling_float32", "travelling_bfloat16"):
            row[f"{name}_to_2_ranks"] = row[name] / rows[0][name]
    return rows

"""Keys and values travel, queries stay: single and double rings, from one table of who holds what.

Forward posts the transfer of the next block before it computes with the one it holds. Backward walks the
table the other way from the block that was held last; the gradients of a block travel with it and end at its
owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_cp.engine.block import Merger, attend, attend_backward
from mindspeed_cp.engine.local import Work, zeros_for


@dataclass(frozen=True)
class Move:
    """One block going from one rank to another.

    Attributes:
        block: whose keys and values.
        source: who sends.
        target: who receives.
        post: the step before whose computation it is posted.
        arrive: the step before whose computation it is waited for.
        outer: it crosses windows of a double ring.
    """

    block: int
    source: int
    target: int
    post: int
    arrive: int
    outer: bool = False


@dataclass(frozen=True)
class RingTable:
    """Who holds which block at which step, and how blocks get there.

    Attributes:
        hold: ``hold[step][rank]`` is a block; every rank meets every block once, its own first.
        moves: of the forward pass.
    """

    hold: tuple[tuple[int, ...], ...]
    moves: tuple[Move, ...]

    @property
    def ranks(self) -> int:
        """Number of ranks, of blocks and of steps."""
        return len(self.hold[0])

    def holder(self, step: int, block: int) -> int:
        """Who holds a block at a step."""
        return self.hold[step].index(block)

    @cached_property
    def backward_moves(self) -> tuple[Move, ...]:
        """Blocks and their gradients from step to step, last step first; steps are counted in that order."""
        last = len(self.hold) - 1
        return tuple(
            Move(block, self.holder(last - step, block), self.holder(last - step - 1, block), step, step + 1)
            for step in range(last)
            for block in range(self.ranks)
        )


@lru_cache(maxsize=16)
def ring_table(ranks: int, window: int = 1) -> RingTable:
    """A single ring, or with ``window`` > 1 rings of that many ranks inside a ring of windows.

    Args:
        ranks: number of ranks.
        window: ranks of an inner ring; divides ``ranks``.

    Raises:
        ValueError: it does not.
    """
    if window < 1 or ranks % window:
        raise ValueError(f"rings of {ranks} ranks cannot have windows of {window}")
    inner = window if window > 1 else ranks
    windows = ranks // inner
    hold, moves = [], []
    for step in range(ranks):
        outer, turn = divmod(step, inner)
        held = [
            (place // inner - outer) % windows * inner + (place % inner - turn) % inner
            for place in range(ranks)
        ]
        hold.append(tuple(held))
        for place in range(ranks):
            own, index = divmod(place, inner)
            if turn + 1 < inner:
                neighbour = own * inner + (index + 1) % inner
                moves.append(Move(held[place], place, neighbour, step, step + 1))
            if turn == 0 and outer + 1 < windows:
                across = (own + 1) % windows * inner + index
                moves.append(Move(held[place], place, across, step, step + inner, outer=True))
    return RingTable(tuple(hold), tuple(moves))


@dataclass(frozen=True)
class RingPlan:
    """A ring attention, as one rank carries it out.

    Attributes:
        table: who holds what.
        rank: this rank within the ring.
        lengths: key rows of every block.
        work: what is computed with each block.
        group: the ring.
        outer_group: for transfers across windows; the same group where there is none of its own.
        kept: blocks that forward keeps for backward: ``none`` but the last, ``keys``, or ``all`` of them.
        wide_gradients: gradients of keys and values travel in float32.
    """

    table: RingTable
    rank: int
    lengths: tuple[int, ...]
    work: tuple[Work, ...]
    group: ProcessGroup
    outer_group: ProcessGroup | None = None
    kept: str = "none"
    wide_gradients: bool = True

    def channel(self, move: Move) -> ProcessGroup:
        """The group that carries a transfer."""
        return self.outer_group if move.outer and self.outer_group is not None else self.group


@dataclass(frozen=True)
class _Shapes:
    """Sizes of keys and values that do not depend on the block."""

    key: tuple[int, int, int]
    value: tuple[int, int, int]

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> _Shapes:
        return cls((*key.shape[:2], key.shape[3]), (*value.shape[:2], value.shape[3]))

    def key_size(self, rows: int) -> int:
        return prod(self.key) * rows

    def value_size(self, rows: int) -> int:
        return prod(self.value) * rows

    def size(self, rows: int) -> int:
        return self.key_size(rows) + self.value_size(rows)

    def split(self, buffer: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values in a flat buffer."""
        batch, heads, width = self.key
        key = buffer[: self.key_size(rows)].view(batch, heads, rows, width)
        return key, self.values(buffer, rows)

    def values(self, buffer: Tensor, rows: int) -> Tensor:
        """Values at the end of a flat buffer, behind keys or alone."""
        batch, heads, width = self.value
        return buffer[buffer.numel() - self.value_size(rows) :].view(batch, heads, rows, width)


class _Transfers:
    """Posted transfers by the step before which they must have arrived."""

    def __init__(self, plan: RingPlan) -> None:
        self.plan = plan
        self.due: dict[int, list[tuple[list[Any], list[Tensor]]]] = {}

    def post(self, moves: Sequence[Move], sending: dict[int, Tensor], receiving: dict[int, Tensor]) -> None:
        """Start the transfers of one step that concern this rank, together where one group carries them."""
        batches: dict[tuple[ProcessGroup, int], list[tuple[dist.P2POp, Tensor]]] = {}
        for move in moves:
            group = self.plan.channel(move)
            if move.source == self.plan.rank:
                peer = dist.get_global_rank(group, move.target)
                buffer = sending[move.block]
                batch = batches.setdefault((group, move.arrive), [])
                batch.append((dist.P2POp(dist.isend, buffer, peer, group), buffer))
            if move.target == self.plan.rank:
                peer = dist.get_global_rank(group, move.source)
                buffer = receiving[move.block]
                batch = batches.setdefault((group, move.arrive), [])
                batch.append((dist.P2POp(dist.irecv, buffer, peer, group), buffer))
        for (_, arrive), batch in batches.items():
            works = dist.batch_isend_irecv([operation for operation, _ in batch])
            # Buffers are held until their transfers are over, whoever else lets go of them.
            self.due.setdefault(arrive, []).append((works, [buffer for _, buffer in batch]))

    def wait(self, step: int) -> None:
        """Wait for what must have arrived before a step."""
        for works, _ in self.due.pop(step, ()):
            for work in works:
                work.wait()


class RingAttention(torch.autograd.Function):
    """Keeps queries, the output, one number per row, and the keys and values that were held last."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: RingPlan) -> Tensor:
        """``[b, n, s, dv]`` of local queries ``[b, n, s, d]`` and the keys of all ranks."""
        table, shapes, me = plan.table, _Shapes.of(key, value), plan.rank
        merger = Merger(query, value.shape[-1])
        transfers = _Transfers(plan)
        blocks = {me: torch.cat((key.reshape(-1), value.reshape(-1)))}
        kept: dict[int, Tensor] = {}
        for step, held in enumerate(table.hold):
            transfers.wait(step)
            moves = [move for move in table.moves if move.post == step]
            for move in moves:
                if move.target == me:
                    size = shapes.size(plan.lengths[move.block])
                    blocks[move.block] = query.new_empty(size, dtype=key.dtype)
            transfers.post(moves, blocks, blocks)
            block = held[me]
            k, v = shapes.split(blocks[block], plan.lengths[block])
            for samples, tasks, scores in plan.work[block]:
                attend(merger, samples, query, k, v, tasks, scores)
            _keep(plan, kept, block, blocks[block], k)
            if step + 1 < len(table.hold):
                _let_go(table, me, step, blocks)
        output = merger.output.to(query.dtype)
        last = table.hold[-1][me]
        ctx.save_for_backward(query, output, merger.logsum, blocks[last], *kept.values())
        ctx.plan, ctx.shapes, ctx.kept = plan, shapes, tuple(kept)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of local queries, keys and values."""
        query, output, logsum, last, *kept = ctx.saved_tensors
        plan, shapes = ctx.plan, ctx.shapes
        found = _RingBackward(plan, shapes, query, output, logsum, gradients[0], dict(zip(ctx.kept, kept)))
        dq, dk, dv = found.run(last)
        return dq.to(query.dtype), dk.to(query.dtype), dv.to(query.dtype), None


def _keep(plan: RingPlan, kept: dict[int, Tensor], block: int, buffer: Tensor, key: Tensor) -> None:
    if plan.kept == "all":
        kept[block] = buffer
    elif plan.kept == "keys":
        kept[block] = key.clone()


def _let_go(table: RingTable, me: int, step: int, blocks: dict[int, Tensor]) -> None:
    """Forget blocks that this rank neither computes with nor sends any more."""
    needed = {table.hold[later][me] for later in range(step + 1, len(table.hold))}
    needed |= {move.block for move in table.moves if move.source == me and move.post > step}
    arriving = {move.block for move in table.moves if move.target == me and move.arrive > step}
    for block in [block for block in blocks if block not in needed | arriving]:
        del blocks[block]


class _RingBackward:
    """One backward pass: the blocks' keys and values, and their gradients behind them."""

    def __init__(
        self,
        plan: RingPlan,
        shapes: _Shapes,
        query: Tensor,
        output: Tensor,
        logsum: Tensor,
        outer: Tensor,
        kept: dict[int, Tensor],
    ) -> None:
        self.plan, self.shapes, self.kept = plan, shapes, kept
        self.query, self.output, self.logsum, self.outer = query, output, logsum, outer

    def run(self, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        plan, shapes, me = self.plan, self.shapes, self.plan.rank
        table, steps = plan.table, len(plan.table.hold)
        (dq,) = zeros_for(self.query)
        travelling = torch.promote_types(last.dtype, torch.float32) if plan.wide_gradients else last.dtype
        blocks = {table.hold[-1][me]: last}
        sums: dict[int, Tensor] = {}
        keys, grads = _Transfers(plan), _Transfers(plan)
        for step in range(steps):
            block = table.hold[steps - 1 - step][me]
            rows = plan.lengths[block]
            keys.wait(step)
            moves = [move for move in table.backward_moves if move.post == step]
            self._post_keys(keys, moves, blocks)
            k, v = self._held(blocks, block, rows)
            dk, dv = zeros_for(k, v)
            for samples, tasks, scores in plan.work[block]:
                attend_backward(
                    (dq, dk, dv),
                    samples,
                    self.query,
                    k,
                    v,
                    self.output,
                    self.logsum,
                    self.outer,
                    tasks,
                    scores,
                )
            grads.wait(step)
            mine = torch.cat((dk.reshape(-1), dv.reshape(-1)))
            if block in sums:
                mine += sums.pop(block)
            if step + 1 < steps:
                outgoing = {block: mine.to(travelling)}
                incoming = {
                    move.block: mine.new_empty(shapes.size(plan.lengths[move.block]), dtype=travelling)
                    for move in moves
                    if move.target == me
                }
                grads.post(moves, outgoing, incoming)
                sums.update(incoming)
            blocks.pop(block, None)
        dk, dv = shapes.split(mine, plan.lengths[me])
        return dq, dk, dv

    def _post_keys(self, keys: _Transfers, moves: Sequence[Move], blocks: dict[int, Tensor]) -> None:
        """Send on what backward still needs: nothing, values, or keys and values."""
        if self.plan.kept == "all":
            return
        shapes, lengths, me = self.shapes, self.plan.lengths, self.plan.rank
        alone = self.plan.kept == "keys"
        size = shapes.value_size if alone else shapes.size
        incoming = {
            move.block: self.query.new_empty(size(lengths[move.block])) for move in moves if move.target == me
        }
        outgoing = dict(blocks)
        if alone:
            outgoing = {block: shapes.values(buffer, lengths[block]) for block, buffer in blocks.items()}
        keys.post(moves, outgoing, incoming)
        blocks.update(incoming)

    def _held(self, blocks: dict[int, Tensor], block: int, rows: int) -> tuple[Tensor, Tensor]:
        if self.plan.kept == "all":
            return self.shapes.split(self.kept[block], rows)
        if self.plan.kept == "keys":
            return self.kept[block], self.shapes.values(blocks[block], rows)
        return self.shapes.split(blocks[block], rows)

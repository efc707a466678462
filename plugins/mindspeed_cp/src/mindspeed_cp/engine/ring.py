"""Keys and values travel, queries stay: single and double rings, from one table of who holds what.

Forward posts the transfer of the next block before it computes with the one it holds. Backward walks the
table the other way from the block that was held last; the gradients of a block travel with it and end at its
owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_cp.engine import counters
from mindspeed_cp.engine.block import Work, attend, attend_backward
from mindspeed_cp.engine.local import zeros_for
from mindspeed_cp.engine.merging import FusedMerger, Merger, sink_gradient
from mindspeed_cp.engine.ring_table import Move, RingTable
from mindspeed_cp.options import CPOptions


@dataclass(frozen=True)
class RingPlan:
    """A ring attention, as one rank carries it out.

    Attributes:
        table: who holds what.
        rank: this rank within the ring.
        lengths: key rows of every block.
        work: what is computed with each block.
        group: the ring.
        options: by what blocks are joined, and in which dtype gradients travel.
        outer_group: for transfers across windows; the same group where there is none of its own.
        second_group: for what ranks with an odd place send inside windows; None: the same group.
        kept: blocks that forward keeps for backward: ``none`` but the last, ``keys``, or ``all`` of them.
    """

    table: RingTable
    rank: int
    lengths: tuple[int, ...]
    work: tuple[Work, ...]
    group: ProcessGroup
    options: CPOptions
    outer_group: ProcessGroup | None = None
    second_group: ProcessGroup | None = None
    kept: str = "none"

    def channel(self, move: Move) -> ProcessGroup:
        """Return the group that carries a transfer.

        Its sender decides: both ends must agree, and one communicator does its transfers one after another.
        """
        if move.outer and self.outer_group is not None:
            return self.outer_group
        if self.second_group is not None and move.source % 2 == 1:
            return self.second_group
        return self.group


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
        """Return keys and values in a flat buffer."""
        batch, heads, width = self.key
        key = buffer[: self.key_size(rows)].view(batch, heads, rows, width)
        return key, self.values(buffer, rows)

    def values(self, buffer: Tensor, rows: int) -> Tensor:
        """Return values at the end of a flat buffer, behind keys or alone."""
        batch, heads, width = self.value
        return buffer[buffer.numel() - self.value_size(rows) :].view(batch, heads, rows, width)


class Transfers:
    """Posted transfers by the step before which they must have arrived."""

    def __init__(self, plan: RingPlan, what: str) -> None:
        self.plan, self.what = plan, what
        self.due: dict[int, list[tuple[list[Any], list[Tensor]]]] = {}
        self.leaving: dict[int, list[Tensor]] = {}

    def post(self, moves: Sequence[Move], sending: dict[int, Tensor], receiving: dict[int, Tensor]) -> None:
        """Start the transfers of one step that concern this rank, together where one group carries them.

        Raises:
            RuntimeError: something would be received where something is still being sent from.
        """
        batches: dict[tuple[ProcessGroup, int], list[tuple[dist.P2POp, Tensor]]] = {}
        self._check_buffers(moves, sending, receiving)

        def add(operation: Any, move: Move, peer: int, buffer: Tensor) -> None:
            group = self.plan.channel(move)
            posted = dist.P2POp(operation, buffer, dist.get_global_rank(group, peer), group)
            batches.setdefault((group, move.arrive), []).append((posted, buffer))

        for move in moves:
            if move.source == self.plan.rank:
                counters.sent(counters.P2P, sending[move.block].nbytes)
                add(dist.isend, move, move.target, sending[move.block])
            if move.target == self.plan.rank:
                add(dist.irecv, move, move.source, receiving[move.block])
        if batches:
            counters.event(f"post {self.what}", moves[0].post)
        # All ranks come to the groups in one order: the first batch of a group waits for all its ranks.
        groups = [self.plan.group, self.plan.second_group, self.plan.outer_group]
        for group, arrive in sorted(batches, key=lambda key: (groups.index(key[0]), key[1])):
            batch = batches[group, arrive]
            works = dist.batch_isend_irecv([operation for operation, _ in batch])
            # Buffers are held until their transfers are over, whoever else lets go of them.
            self.due.setdefault(arrive, []).append((works, [buffer for _, buffer in batch]))

    def _check_buffers(
        self, moves: Sequence[Move], sending: dict[int, Tensor], receiving: dict[int, Tensor]
    ) -> None:
        for move in moves:
            if move.source == self.plan.rank:
                self.leaving.setdefault(move.arrive, []).append(sending[move.block])
        busy = {_storage(buffer) for buffers in self.leaving.values() for buffer in buffers}
        for move in moves:
            if move.target == self.plan.rank and _storage(receiving[move.block]) in busy:
                raise RuntimeError(f"block {move.block} would arrive where another is still sent from")

    def wait(self, step: int) -> None:
        """Wait for what must have arrived before a step."""
        if step in self.due:
            counters.event(f"wait {self.what}", step)
        for works, _ in self.due.pop(step, ()):
            for work in works:
                work.wait()
        self.leaving.pop(step, None)


def _storage(buffer: Tensor) -> int:
    return buffer.untyped_storage()._cdata


class RingAttention(torch.autograd.Function):
    """Keeps queries, the output, one number per row, and the keys and values that were held last."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: RingPlan, sink: Tensor | None = None
    ) -> Tensor:
        """Return ``[b, n, s, dv]`` of local queries ``[b, n, s, d]``, all keys; ``sink`` is ``[n]``."""
        table, shapes, me = plan.table, _Shapes.of(key, value), plan.rank
        merger = (FusedMerger if plan.options.fused_update else Merger)(query, value.shape[-1], sink)
        transfers = Transfers(plan, "keys")
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
            counters.event("compute", step)
            k, v = shapes.split(blocks[block], plan.lengths[block])
            attend(merger, query, k, v, plan.work[block])
            _keep(plan, kept, block, blocks[block], k)
            if step + 1 < len(table.hold):
                _drop_unneeded(table, me, step, blocks)
        output = merger.output.to(query.dtype)
        last = table.hold[-1][me]
        ctx.save_for_backward(query, output, merger.logsum, sink, blocks[last], *kept.values())
        ctx.plan, ctx.shapes, ctx.kept = plan, shapes, tuple(kept)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of local queries, keys and values, and of further scores."""
        query, output, logsum, sink, last, *kept = ctx.saved_tensors
        plan, shapes = ctx.plan, ctx.shapes
        found = _RingBackward(plan, shapes, query, output, logsum, gradients[0], dict(zip(ctx.kept, kept)))
        dq, dk, dv = found.run(last)
        dsink = sink_gradient(sink, output, logsum, gradients[0])
        return dq.to(query.dtype), dk.to(query.dtype), dv.to(query.dtype), None, dsink


def _keep(plan: RingPlan, kept: dict[int, Tensor], block: int, buffer: Tensor, key: Tensor) -> None:
    if plan.kept == "all":
        kept[block] = buffer
    elif plan.kept == "keys":
        kept[block] = key.clone()


def _drop_unneeded(table: RingTable, me: int, step: int, blocks: dict[int, Tensor]) -> None:
    """Forget blocks that this rank neither computes with nor sends any more."""
    needed = {table.hold[later][me] for later in range(step + 1, len(table.hold))}
    needed |= {move.block for move in table.moves if move.source == me and move.post > step}
    arriving = {move.block for move in table.moves if move.target == me and move.arrive > step}
    for block in [block for block in blocks if block not in needed | arriving]:
        del blocks[block]


@dataclass
class _RingBackward:
    """One backward pass: the blocks' keys and values, and their gradients behind them."""

    plan: RingPlan
    shapes: _Shapes
    query: Tensor
    output: Tensor
    logsum: Tensor
    outer: Tensor
    kept: dict[int, Tensor]

    def run(self, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        plan, shapes, me = self.plan, self.shapes, self.plan.rank
        table, steps = plan.table, len(plan.table.hold)
        (dq,) = zeros_for(self.query)
        wide = torch.promote_types(last.dtype, torch.float32)
        travelling = wide if plan.options.wide_gradients else last.dtype
        blocks = {table.hold[-1][me]: last}
        sums: dict[int, Tensor] = {}
        keys, grads = Transfers(plan, "keys"), Transfers(plan, "gradients")
        for step in range(steps):
            block = table.hold[steps - 1 - step][me]
            rows = plan.lengths[block]
            keys.wait(step)
            moves = [move for move in table.backward_moves if move.post == step]
            self._post_keys(keys, moves, blocks)
            k, v = self._keys_and_values(blocks, block, rows)
            counters.event("compute", step)
            gradient = last.new_zeros(shapes.size(rows), dtype=wide)
            dk, dv = shapes.split(gradient, rows)
            results = self.output, self.logsum, self.outer
            attend_backward((dq, dk, dv), self.query, k, v, *results, plan.work[block])
            grads.wait(step)
            if block in sums:
                gradient += sums.pop(block)
            if step + 1 < steps:
                outgoing = {block: gradient.to(travelling)}
                incoming = {
                    move.block: last.new_empty(shapes.size(plan.lengths[move.block]), dtype=travelling)
                    for move in moves
                    if move.target == me
                }
                grads.post(moves, outgoing, incoming)
                sums.update(incoming)
                # What is on its way is held by its transfer alone.
                del gradient, dk, dv, outgoing, incoming
            del k, v
            blocks.pop(block, None)
        return dq, dk, dv

    def _post_keys(self, keys: Transfers, moves: Sequence[Move], blocks: dict[int, Tensor]) -> None:
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

    def _keys_and_values(self, blocks: dict[int, Tensor], block: int, rows: int) -> tuple[Tensor, Tensor]:
        if self.plan.kept == "all":
            return self.shapes.split(self.kept[block], rows)
        if self.plan.kept == "keys":
            return self.kept[block], self.shapes.values(blocks[block], rows)
        return self.shapes.split(blocks[block], rows)

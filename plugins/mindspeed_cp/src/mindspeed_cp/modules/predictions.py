"""Tokens, labels and masks moved by one position where a sequence is split, to predict further tokens.

megatron-core's own shift knows one layout. Here a rank's shares say where each of them continues: the next
value is the rank's own except behind the end of a share, where it is the first of somebody's share. Those
first values travel together with the sum that the loss divides by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor

from mindspeed_cp.engine.layout import Layout
from mindspeed_cp.engine.planners import layout_of
from mindspeed_cp.modules.batch import SplitBatch

if TYPE_CHECKING:
    from mindspeed_core.session import Session

Shift = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ShiftPlan:
    """Where a rank's values come from when everything moves one position forward.

    Attributes:
        first: local rows at which the rank's shares begin.
        last: local rows at which they end.
        sources: for each of ``last``, the number of the share that continues it, counting every rank's shares
            behind one another with ``most`` for each; -1 at the end of the sequence.
        most: the largest number of shares of a rank.
        origin: the number of the share that begins the sequence.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    sources: tuple[int, ...]
    most: int
    origin: int


@lru_cache(maxsize=64)
def shift_plan(layout: Layout, rank: int) -> ShiftPlan:
    """The plan of one rank.

    Args:
        layout: the shares of all ranks.
        rank: within context parallelism.
    """
    shares = [[part for part in layout.chunks(r) if part[1][0] < part[1][1]] for r in range(layout.ranks)]
    most = max(map(len, shares))
    begins = {start: r * most + i for r in range(layout.ranks) for i, (_, (start, _)) in enumerate(shares[r])}
    mine = shares[rank]
    return ShiftPlan(
        first=tuple(row for row, _ in mine),
        last=tuple(row + end - start - 1 for row, (start, end) in mine),
        sources=tuple(begins.get(end, -1) for _, (_, end) in mine),
        most=most,
        origin=begins[0],
    )


def shifted(tensor: Tensor, layout: Layout, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Every position's successor, 0 behind the last; and the sum over all ranks of what is left.

    Args:
        tensor: ``[..., s / cp]``, this rank's positions.
        layout: the shares of all ranks.
        group: the ranks of context parallelism.

    Returns:
        ``[..., s / cp]``, and a scalar.
    """
    rank, ranks = group.rank(), group.size()
    plan = shift_plan(layout, rank)
    rows = tensor.reshape(-1, tensor.shape[-1])
    mine = tensor.new_zeros(plan.most + 1, rows.shape[0])
    mine[: len(plan.first)] = rows[:, list(plan.first)].T
    mine[-1] = rows.sum(-1)
    gathered = tensor.new_empty(ranks * (plan.most + 1), rows.shape[0])
    dist.all_gather_into_tensor(gathered, mine, group=group)
    everyone = gathered.view(ranks, plan.most + 1, -1)
    begins = torch.cat((everyone[:, :-1].flatten(0, 1), tensor.new_zeros(1, rows.shape[0])))
    moved = rows.roll(-1, dims=-1)
    moved[:, list(plan.last)] = begins[list(plan.sources)].T
    total = everyone[:, -1].sum() - begins[plan.origin].sum()
    return moved.view_as(tensor), total


def over_ranks(original: Shift) -> Shift:
    """Megatron-core's ``roll_tensor`` that also shifts across the ranks of a split sequence.

    Args:
        original: what it was; still serves batches that are whole.
    """

    def roll_tensor(
        tensor: Tensor, shifts: int = -1, dims: int = -1, cp_group: Any = None, packed_seq_params: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Shift ``[b, s / cp]`` by one position; the sum is this rank's share of the sequence's.

        Gradients are averaged over the ranks of context parallelism: a loss divided by this sum then counts
        every token of the sequence alike.

        Raises:
            ValueError: another shift than by one position along the last dimension.
        """
        if not isinstance(packed_seq_params, SplitBatch):
            return original(tensor, shifts, dims, cp_group, packed_seq_params)
        if cp_group is None or cp_group.size() == 1:
            return original(tensor, shifts, dims)
        if shifts != -1 or dims not in (-1, tensor.dim() - 1):
            raise ValueError(
                f"a split sequence is shifted by -1 along its last dimension, got {shifts}, {dims}"
            )
        moved, total = shifted(tensor, layout_of(packed_seq_params.grid, packed_seq_params.rules), cp_group)
        return moved, total / cp_group.size()

    return roll_tensor


def recompute_described(session: Session, model: list[Any], owner: str) -> None:
    """Let recomputed prediction layers see the batch's description, which is no tensor.

    megatron-core hands everything to its checkpoint of activations as if it were one.

    Args:
        session: takes the change back when it closes.
        model: this rank's chunks.
        owner: the feature's name.
    """
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, MultiTokenPredictionLayer):
                changed = _beside_tensors(module._checkpointed_forward)
                session.instances.set(owner, module, "_checkpointed_forward", changed)


def _beside_tensors(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def checkpointed_forward(forward: Callable[..., Tensor], **inputs: Any) -> Tensor:
        described, names = inputs["packed_seq_params"], tuple(inputs)

        def with_description(*values: Any, **named: Any) -> Tensor:
            return forward(**{**dict(zip(names, values)), **named, "packed_seq_params": described})

        return original(with_description, **{**inputs, "packed_seq_params": None})

    return checkpointed_forward

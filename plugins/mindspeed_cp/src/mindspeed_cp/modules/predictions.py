"""Tokens, labels and masks moved by one position where a sequence is split, to predict further tokens.

megatron-core's own shift knows one layout. Here a rank's shares say where each of them continues: the next
value is the rank's own except behind the end of a share, where it is the first of somebody's share. Those
first values travel together with the sum that the loss divides by.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor

from mindspeed_cp.engine.layout import Layout
from mindspeed_cp.engine.shift import shift_plan
from mindspeed_cp.modules.batch import SplitBatch

if TYPE_CHECKING:
    from mindspeed_core.session import Session

Shift = Callable[..., tuple[Tensor, Tensor]]


def shift_over_ranks(tensor: Tensor, layout: Layout, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return every position's successor, 0 behind the last, and the sum over all ranks of what is left.

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
    padded = tensor.new_zeros(plan.most + 1, rows.shape[0])
    padded[: len(plan.first)] = rows[:, list(plan.first)].T
    padded[-1] = rows.sum(-1)
    gathered = tensor.new_empty(ranks * (plan.most + 1), rows.shape[0])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    everyone = gathered.view(ranks, plan.most + 1, -1)
    begins = torch.cat((everyone[:, :-1].flatten(0, 1), tensor.new_zeros(1, rows.shape[0])))
    moved = rows.roll(-1, dims=-1)
    moved[:, list(plan.last)] = begins[list(plan.sources)].T
    total = everyone[:, -1].sum() - begins[plan.origin].sum()
    return moved.view_as(tensor), total


def over_ranks(original: Shift) -> Shift:
    """Return megatron-core's ``roll_tensor``, which serves whole batches, extended to split sequences."""

    def roll_tensor(
        tensor: Tensor, shifts: int = -1, dims: int = -1, cp_group: Any = None, packed_seq_params: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Shift ``[b, s / cp]`` by one position; the sum is this rank's share of the sequence's.

        Gradients are averaged over the ranks of context parallelism: a loss divided by this sum then counts
        every token of the sequence alike.

        Raises:
            ValueError: another shift than by one position along the last dimension.
        """
        # Newer versions also shift what a stage has not got.
        if tensor is None or not isinstance(packed_seq_params, SplitBatch):
            return original(tensor, shifts, dims, cp_group, packed_seq_params)
        if cp_group is None or cp_group.size() == 1:
            return original(tensor, shifts, dims)
        if shifts != -1 or dims not in (-1, tensor.dim() - 1):
            raise ValueError(
                f"a split sequence is shifted by -1 along its last dimension, got {shifts}, {dims}"
            )
        assert packed_seq_params.layout is not None
        moved, total = shift_over_ranks(tensor, packed_seq_params.layout, cp_group)
        return moved, total / cp_group.size()

    return roll_tensor


def recompute_described(session: Session, model: list[Any], owner: str) -> None:
    """Let recomputed prediction layers see the batch's description, which is no tensor.

    megatron-core up to 0.17 hands everything to its checkpoint of activations as if it were one; later its
    checkpoint is of a function of its own, which holds the description.
    """
    if "forward_func" not in signature(MultiTokenPredictionLayer._checkpointed_forward).parameters:
        return
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, MultiTokenPredictionLayer):
                changed = _with_description(module._checkpointed_forward)
                session.instances.set(owner, module, "_checkpointed_forward", changed)


def _with_description(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def checkpointed_forward(forward: Callable[..., Tensor], **inputs: Any) -> Tensor:
        described, names = inputs["packed_seq_params"], tuple(inputs)

        def with_description(*values: Any, **named: Any) -> Tensor:
            return forward(**{**dict(zip(names, values)), **named, "packed_seq_params": described})

        return original(with_description, **{**inputs, "packed_seq_params": None})

    return checkpointed_forward

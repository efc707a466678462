"""Copies of hot experts: rows of the most loaded experts are computed where their tokens are.

Which experts are hot is decided for each micro-batch from the rows that every rank sends to every expert. A
copy is no parameter: it is received from the owner inside the call of the experts, and its gradient goes back
to the owner. That is done where backward leaves the layer's input, a place that every rank passes once, also
one without rows for any copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mindspeed_moe.expert_map.planning import hot_experts

Groups = Callable[[], Sequence[dist.ProcessGroup]]
"""Returns communicators over the ranks that experts are spread over; what they carry is independent."""


class HotExperts:
    """The hot experts of a layer; holds nothing from one call to the next."""

    def __init__(self, number: int, group: dist.ProcessGroup, groups: Groups) -> None:
        """Describe the copies.

        Args:
            number: of experts that are copied at most.
            group: the ranks that experts are spread over.
            groups: communicators for weights and gradients of copies.
        """
        self._number = number
        self._group = group
        self._groups = groups

    def choose(self, routing_map: Tensor) -> list[int]:
        """Return the hot experts of bool ``[tokens, experts]``, the same on every rank; collective."""
        local = routing_map.sum(0)
        everyones = local.new_empty(self._group.size() * local.shape[0])
        dist.all_gather_into_tensor(everyones, local, group=self._group)
        return sorted(hot_experts(everyones.view(-1, local.shape[0]).tolist(), self._number))

    def copies(self, chosen: Sequence[int], routing_map: Tensor, probs: Tensor) -> Copies:
        """Return the copies of one call.

        Args:
            chosen: what `choose` returned.
            routing_map: bool ``[tokens, experts]``.
            probs: ``[tokens, experts]``.
        """
        return Copies(chosen, routing_map, probs, self._group, self._groups())


class Copies:
    """The copies of hot experts in one call of a layer.

    Attributes:
        others: bool ``[tokens, experts]``, the rows that travel.
        rows: int64 ``[chosen]``, of each copy on this rank; the owner has none.
        probs: ``[m]``, of these rows.
    """

    def __init__(
        self,
        chosen: Sequence[int],
        routing_map: Tensor,
        probs: Tensor,
        group: dist.ProcessGroup,
        groups: Sequence[dist.ProcessGroup],
    ) -> None:
        """Take the rows of copies out of those that travel.

        Args:
            chosen: hot experts, rising.
            routing_map: bool ``[tokens, experts]``.
            probs: ``[tokens, experts]``.
            group: the ranks that experts are spread over.
            groups: communicators over them.
        """
        slots, rank = routing_map.shape[1] // group.size(), group.rank()
        self._owners = [expert // slots for expert in chosen]
        self._mine = [
            (index, expert % slots) for index, expert in enumerate(chosen) if expert // slots == rank
        ]
        self._ranks = dist.get_process_group_ranks(group)
        self._groups = groups
        self._weights: tuple[Tensor, ...] = ()
        here = routing_map[:, list(chosen)]
        for index, _ in self._mine:
            here[:, index] = False
        foreign = [expert for expert in chosen if expert // slots != rank]
        self.others = routing_map.clone()
        self.others[:, foreign] = False
        self.rows = here.sum(0)
        copy, self._tokens = here.t().nonzero(as_tuple=True)
        experts = torch.tensor(list(chosen), device=copy.device)[copy]
        self.probs = probs[self._tokens, experts]

    def at_input(self, hidden: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return ``[s, b, h]``, whose gradient brings those of the copies to their owners.

        Args:
            hidden: ``[s, b, h]``; everything that the experts and the copies compute comes from the result.
            first: the weights of this rank's experts, whose values are not read.
            second: likewise.
        """
        result: Tensor = _AtInput.apply(hidden, first, second, self)
        return result

    def tokens(self, hidden: Tensor) -> Tensor:
        """Return the rows ``[m, h]`` of ``[s, b, h]``, sorted by copy."""
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._tokens)

    def add(self, output: Tensor, results: Tensor) -> Tensor:
        """Return ``[s, b, h]`` with the results ``[m, h]`` of the copies added to those of their tokens."""
        flat = output.reshape(-1, output.shape[-1])
        return flat.index_add(0, self._tokens, results.to(flat.dtype)).view(output.shape)

    def receive(self, *parameters: tuple[Tensor, int]) -> tuple[Tensor, ...]:
        """Return weights of the copies; collective, inside the call of the experts that own the parameters.

        Args:
            parameters: each with the number of its experts.

        Returns:
            ``[chosen, elements]`` for each.
        """
        weights, works = [], []
        for parameter, count in parameters:
            of_each = parameter.detach().view(count, -1)
            copies = of_each.new_empty(len(self._owners), of_each.shape[1])
            for index, slot in self._mine:
                copies[index].copy_(of_each[slot])
            works += [
                dist.broadcast(copies[index], self._ranks[owner], group=self._lane(index), async_op=True)
                for index, owner in enumerate(self._owners)
            ]
            weights.append((copies, parameter.requires_grad))
        for work in works:
            work.wait()
        learns = torch.is_grad_enabled()
        received = tuple(copies.requires_grad_(learns and needs) for copies, needs in weights)
        self._weights = received if learns else ()
        return received

    def take_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the sums of the gradients of copies, in the shapes of this rank's parameters; collective."""
        received, self._weights = self._weights, ()
        found: list[Tensor | None] = []
        for copies, parameter in zip(received, parameters):
            # Sums of many ranks in a short format would lose what single rows add.
            gradients, copies.grad = copies.grad, None
            sums = torch.zeros_like(copies, dtype=torch.float32)
            if gradients is not None:
                sums.copy_(gradients)
            works = [
                dist.reduce(sums[index], self._ranks[owner], group=self._lane(index), async_op=True)
                for index, owner in enumerate(self._owners)
            ]
            for work in works:
                work.wait()
            if not self._mine:
                found.append(None)
                continue
            gradient = torch.zeros_like(parameter)
            of_each = gradient.view(-1, copies.shape[1])
            for index, slot in self._mine:
                of_each[slot] = sums[index].to(gradient.dtype)
            found.append(gradient)
        return found

    def _lane(self, index: int) -> dist.ProcessGroup:
        return self._groups[index % len(self._groups)]


class _AtInput(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, first: Tensor, second: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        ctx.parameters = first, second
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not any(ctx.needs_input_grad[1:3]):
            return gradients[0], None, None, None
        return gradients[0], *ctx.copies.take_gradients(ctx.parameters), None

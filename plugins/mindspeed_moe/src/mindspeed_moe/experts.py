"""Grouped experts whose weight gradients backward computes later, and shared experts in two halves."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor
from torch.nn import functional as F

from mindspeed_kernels.modules.grouped_experts import GroupedExperts
from mindspeed_kernels.ops.gmm import grouped_matmul
from mindspeed_kernels.ops.row_groups import ends_of_groups
from mindspeed_megatron.shared_experts import first_half
from mindspeed_moe.weight_gradients import LaterGradient, product_with_later_gradient
from mindspeed_moe.zero_memory import Saving, experts_that_save

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mindspeed_moe.expert_map.copies import Copies

Later = dict[Tensor, LaterGradient]
"""The later gradients of one call, by parameter."""


class LaterGroupedExperts(GroupedExperts):
    """Grouped experts that compute their weight gradients where the caller wants them."""

    _later: Later | None = None
    # Anchors hand on what they would compute.
    put_off_weight_gradients = GroupedExperts.put_off_weight_gradients

    def later_gradients(self, *, both: bool) -> Later:
        """Create, here in the graph, the nodes that will compute the weight gradients of one call.

        Args:
            both: of both weights; otherwise the second one's is created with its product, and its operands
                are let go of before backward computes the gradient of the activation.
        """
        parameters = (self.weight1, self.weight2) if both else (self.weight1,)
        return {parameter: self._anchored(parameter) for parameter in parameters}

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        later: Later | None = None,
        saving: Saving | None = None,
    ) -> tuple[Tensor, None]:
        """Compute the experts, see `GroupedExperts`.

        Args:
            permuted_local_hidden_states: ``[m, h]``, rows sorted by local expert.
            tokens_per_expert: ``[E]``, number of rows of each.
            permuted_probs: ``[m]``, the router's probability of each row.
            later: what `later_gradients` returned for this call; without it nothing is delayed.
            saving: what is kept for backward; without it what megatron-core keeps.
        """
        if saving is not None and torch.is_grad_enabled():
            later = later or {}
            rows = permuted_local_hidden_states
            ends = ends_of_groups(
                "--moe-grouped-gemm", tokens_per_expert, rows.shape[0], self.num_local_experts, counts=True
            )

            experts, hidden = self.num_local_experts, self.config.hidden_size
            weights = self.weight1.view(experts, hidden, -1), self.weight2.view(experts, -1, hidden)
            of_weights = (
                self._later_gradient(later, self.weight1),
                partial(self._later_gradient, later, self.weight2),
            )
            return experts_that_save(self, weights, rows, permuted_probs, ends, of_weights, saving), None
        self._later = later
        try:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        finally:
            self._later = None

    def _product(self, rows: Tensor, parameter: Tensor, shape: tuple[int, ...], ends: Tensor) -> Tensor:
        if self._later is None or not torch.is_grad_enabled():
            return super()._product(rows, parameter, shape, ends)
        accumulates = self.accumulates and hasattr(parameter, "main_grad")
        later = self._later_gradient(self._later, parameter)
        return product_with_later_gradient(rows, parameter.view(shape), ends, later, accumulates=accumulates)

    def _later_gradient(self, later: Later, parameter: Any) -> LaterGradient:
        found = later.get(parameter)
        return found if found is not None else self._anchored(parameter)

    def _anchored(self, parameter: Any) -> LaterGradient:
        return LaterGradient(parameter, None if self._leave is None else self._put_off)


class CopiedExperts(GroupedExperts):
    """Grouped experts that also compute rows of copies of other ranks' experts."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        copies: Copies | None = None,
    ) -> tuple[Tensor, None]:
        """Compute the experts, see `GroupedExperts`.

        Args:
            permuted_local_hidden_states: ``[m, h]``, rows sorted by expert.
            tokens_per_expert: number of rows of each.
            permuted_probs: ``[m]``, the router's probability of each row.
            copies: compute them instead of this rank's experts.
        """
        if copies is None:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        count, hidden = self.num_local_experts, self.config.hidden_size
        first, second = copies.receive((self.weight1, count), (self.weight2, count))
        rows = permuted_local_hidden_states
        ends = ends_of_groups(
            "--balanced-moe-experts", tokens_per_expert, rows.shape[0], first.shape[0], counts=True
        )
        inner = grouped_matmul(rows, first.view(first.shape[0], hidden, -1), ends)
        inner = self.activation_func_with_probs(inner, permuted_probs.unsqueeze(-1))
        return grouped_matmul(inner, second.view(second.shape[0], -1, hidden), ends), None


class SharedExpertHalves(SharedExpertMLP):
    """megatron-core's shared expert, whose two products may run apart from one another.

    Each half is a call of the module, so that hooks that complete its parameters run before they are read.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        """Build the shared expert without a stream; its linear layers communicate by themselves."""
        own = copy(config)
        own.moe_shared_expert_overlap = False
        super().__init__(own, *args, **options)
        # The configuration that its methods read is a copy of its own.
        self.config.moe_shared_expert_overlap = True

    def forward(self, hidden_states: Tensor, gate_input: Tensor | None = None, half: int = 0) -> Tensor:
        """Compute the shared expert, or one half of it.

        Args:
            hidden_states: ``[s, b, h]``; for the second half the result of the first, ``[s, b, f/tp]``.
            gate_input: for the second half, the ``[s, b, h]`` that went into the first.
            half: 1 or 2; 0 for both.

        Returns:
            ``[s, b, h]``; the first half ``[s, b, f/tp]``.
        """
        if not half:
            return super().forward(hidden_states)
        if half == 1:
            return first_half(self, hidden_states)
        output, _ = self.linear_fc2(hidden_states)
        if self.use_shared_expert_gate:
            assert gate_input is not None
            output = output * torch.sigmoid(F.linear(gate_input, self.gate_weight))
        return output

"""A transformer layer whose slices of the sequence take turns: attention of one, experts of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from megatron.core.transformer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from mindspeed_moe.layer import LaunchedMoELayer
from mindspeed_moe.sliced.attention import attend, heads_of
from mindspeed_moe.sliced.routers import carrying


class SlicedMoELayer(LaunchedMoELayer):
    """A layer of experts that also takes a slice of the tokens at a time; called, it takes all of them."""

    def __init__(self, *args: Any, gathers_apart: bool = False, **options: Any) -> None:
        """Build the layer; ``gathers_apart`` runs gathers of cut experts beside other slices."""
        super().__init__(*args, **options)
        self.gathers_apart = gathers_apart

    def route(self, hidden: Tensor, logits: list[Tensor]) -> Any:
        """Return a call whose rows ``[s, b, h]`` are on their way; logits of the slice are added."""
        probs, routing_map = self.router(hidden, logits=logits)
        if self.expert_map is not None:
            if self.training and torch.is_grad_enabled():
                self.expert_map.count(routing_map)
            probs, routing_map = self.expert_map.columns_by_slot(probs, routing_map)
        call: Any = copy(self.token_dispatcher)
        call.launch_dispatch(hidden, routing_map, probs, lambda: None)
        shared: Any = self.shared_experts
        call.of_shared = None if shared is None else self.shared_experts_compute(hidden)
        return call

    def compute(self, call: Any) -> None:
        """Compute the experts of a call, and send results on their way."""
        results, _ = self.experts(*call.wait_dispatch())
        if self.gathers_apart:
            call.launch_scatter(results)
        else:
            call.launch_combine(results)

    def combine(self, call: Any) -> Tensor:
        """Return the results of a call, ``[s, b, h]``."""
        output: Tensor = call.wait_combine()
        return output if call.of_shared is None else output + call.of_shared

    def balance(self, logits: Sequence[Tensor], padding_mask: Tensor | None) -> Tensor:
        """Return the probabilities of all tokens, which carry the router's losses."""
        mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
        probs: Tensor = self.router(logits[0], mask, logits=list(logits), last=True)[0]
        return probs


class SlicedTransformerLayer(TransformerLayer):
    """megatron-core's layer, in training slice by slice where it has experts."""

    def __init__(self, *args: Any, slices: int, **options: Any) -> None:
        """Build megatron-core's layer, whose sequence is cut into so many slices."""
        super().__init__(*args, **options)
        self._slices = slices

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> tuple[Tensor, Any]:
        """Compute ``[s, b, h]``; see megatron-core's layer."""
        if args or not self._divides(hidden_states.shape[0], given):
            output: tuple[Tensor, Any] = super().forward(hidden_states, *args, **given)
            return output
        return self._sliced(hidden_states, given), given.get("context")

    def _divides(self, length: int, given: dict[str, Any]) -> bool:
        """Return whether slices of a call are computed as the whole would be."""
        if not self.training or not isinstance(self.mlp, SlicedMoELayer):
            return False
        # A library session may train on sequences of other lengths than it planned with.
        return not length % self._slices and all(
            given.get(name) is None
            for name in ("inference_context", "inference_params", "packed_seq_params", "attention_bias")
        )

    def _sliced(self, hidden_states: Tensor, given: dict[str, Any]) -> Tensor:
        experts: SlicedMoELayer = self.mlp
        heads = heads_of(
            self.self_attention, self.input_layernorm(hidden_states), given.get("rotary_pos_emb")
        )
        mask, residuals = given.get("attention_mask"), hidden_states.chunk(self._slices)
        ranks, each = heads[0].shape[0] // hidden_states.shape[0], residuals[0].shape[0]
        logits: list[Tensor] = []
        calls: list[Any] = []
        after_attention: list[Tensor] = []
        results: list[Tensor] = []

        def begin(number: int) -> None:
            # Of each rank's part of the sequence its own slice: a scatter leaves it where its residual is.
            starts = [rank * hidden_states.shape[0] + number * each for rank in range(ranks)]
            parts = [slice(start, start + each) for start in starts]
            attended = attend(self.self_attention, heads, mask, parts)
            hidden = self._added(self.self_attn_bda, attended, residuals[number])
            after_attention.append(hidden)
            calls.append(experts.route(self.pre_mlp_layernorm(hidden), logits))

        def end(number: int) -> None:
            combined = experts.combine(calls[number]), None
            results.append(self._added(self.mlp_bda, combined, after_attention[number]))

        def compute(number: int) -> None:
            experts.compute(calls[number])

        stages: list[tuple[int, Callable[[int], None]]]
        if experts.gathers_apart:
            # What is launched first in a turn is in flight while experts are computed.
            stages = [
                (0, begin),
                (1, lambda number: calls[number].launch_gather()),
                (3, lambda number: calls[number].launch_combine_of_sums()),
                (2, compute),
                (4, end),
            ]
        else:
            stages = [(0, begin), (1, compute), (2, end)]
        for turn in range(self._slices + max(late for late, _ in stages)):
            for late, stage in stages:
                if 0 <= turn - late < self._slices:
                    stage(turn - late)
        output = torch.cat(results)
        if torch.is_grad_enabled():
            output = carrying(output, experts.balance(logits, given.get("padding_mask")))
        viewless: Tensor = make_viewless_tensor(
            inp=output, requires_grad=output.requires_grad, keep_graph=True
        )
        return viewless

    def _added(self, builder: Any, output: tuple[Tensor, Any], residual: Tensor) -> Tensor:
        """Return the sum of an output with its bias, some of it dropped, and a residual."""
        with self.bias_dropout_add_exec_handler():
            added: Tensor = builder(self.training, self.config.bias_dropout_fusion)(
                output, residual, self.hidden_dropout
            )
        return added

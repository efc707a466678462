"""The layer of experts: megatron-core's, with its communication beside computation."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from torch import Tensor

from mindspeed_moe.crowded import Calls, level_of_call
from mindspeed_moe.dispatchers import DISPATCHERS, FusedAllToAllDispatcher
from mindspeed_moe.expert_map.copies import Groups, HotExperts
from mindspeed_moe.expert_map.layer_map import LayerMap
from mindspeed_moe.experts import LaterGroupedExperts
from mindspeed_moe.options import ACTIVATION, DISABLED, LEVEL0, LEVEL1
from mindspeed_moe.planned_dispatcher import Plan, PlannedDispatcher
from mindspeed_moe.turns import Turns
from mindspeed_moe.zero_memory import Saving

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


class LaunchedMoELayer(MoELayer):
    """Tokens travel to experts and back while the rank computes, or at least at the same time.

    Where it overlaps, the first half of a shared expert runs while rows are on their way to the experts, the
    second half while results are on their way back. In backward the halves run under the mirrored exchanges,
    and the weight gradients of the experts under the one that takes gradients of rows back.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        groups: Callable[[], ProcessGroupCollection],
        overlaps: bool,
        saves: str = DISABLED,
        crowded: tuple[float, Callable[[], Calls]] | None = None,
        fuses: bool = False,
        plan: Callable[[], Plan] | None = None,
        turns: Callable[[], Turns] | None = None,
        dispatcher: Callable[..., Any] | None = None,
        moves: bool = False,
        copies: tuple[int, Groups] | None = None,
        **further: Any,
    ) -> None:
        """Build megatron-core's layer with another dispatcher.

        Args:
            config: of the model.
            submodules: where it overlaps, with `LaterGroupedExperts` and any shared experts as
                `SharedExpertHalves`.
            layer_number: of the layer in the model, from 1.
            pg_collection: the groups; megatron-core's layers hand them to its own class only.
            groups: returns them where they are not handed over.
            overlaps: compute shared experts and weight gradients while rows travel; otherwise only the
                collectives of a direction run beside one another.
            saves: what is kept of the experts, one of the levels of `mindspeed_moe.options`.
            crowded: keep less in a call that brings a rank more than so many times the mean of rows, counted
                by what the function returns; None for never.
            fuses: sort tokens by expert and bring results back by one kernel each, for an all-to-all.
            plan: returns the plan of communication; without one rows are exchanged at once.
            turns: returns the passes that take turns, where it overlaps: before this layer waits, the pass of
                another micro-batch goes on.
            dispatcher: builds another dispatcher than those of megatron-core's names.
            moves: experts are not always where megatron-core puts them.
            copies: of so many hot experts at most, with the communicators that carry them.
            further: what newer versions of megatron-core hand to their layer.
        """
        given = pg_collection or groups()
        super().__init__(config, submodules, layer_number, given, **further)
        self._overlaps = overlaps
        self._saves = saves
        self._turns = turns
        self.expert_map = LayerMap(int(config.num_moe_experts or 0), given.ep.size()) if moves else None
        self._hot = HotExperts(copies[0], given.ep, copies[1]) if copies is not None else None
        self._crowded = crowded
        # A pass that goes on meanwhile needs both to be computed while gradients of rows travel.
        self._delays_both = turns is not None or (
            (saves, crowded) == (DISABLED, None)
            and not config.moe_apply_probs_on_input
            and delaying_both_costs_nothing(config)
        )
        # A module that computes shared experts apart is not called by megatron-core's dispatcher.
        self.shared_expert_overlap = overlaps
        if plan is not None:
            self.token_dispatcher = PlannedDispatcher(plan(), self.num_local_experts)
            return
        kind = FusedAllToAllDispatcher if fuses else DISPATCHERS[config.moe_token_dispatcher_type]
        self.token_dispatcher = (dispatcher or kind)(
            self.num_local_experts, self.local_expert_indices, config=config, pg_collection=given
        )

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Compute the layer.

        Args:
            hidden_states: ``[s, b, h]``.
            intermediate_tensors: None; others belong to CUDA graphs.
            padding_mask: bool ``[b, s]``, True for positions that are no tokens.

        Returns:
            ``[s, b, h]``, and no bias.

        Raises:
            ValueError: tensor-parallel ranks would all route the same tokens.
        """
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ValueError("experts under tensor parallelism train with --sequence-parallel only")
        mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute:
            output = tensor_parallel.checkpoint(lambda x: self._mix(x, mask), False, hidden_states)
        else:
            output = self._mix(hidden_states, mask)
        return output, None

    def _mix(self, hidden: Tensor, padding_mask: Tensor | None) -> Tensor:
        shared: Any = self.shared_experts
        # Backward adds up the gradients of the input from the last reader to the first one. Shared experts
        # read first as in megatron-core's layer, which makes the sum equal to the bit.
        if shared is not None and not self._overlaps:
            of_shared = self.shared_experts_compute(hidden)
        elif shared is not None:
            first, gate = hidden.view_as(hidden), hidden.view_as(hidden)
        probs, routing_map = self.router(hidden, *(() if padding_mask is None else (padding_mask,)))
        if self.expert_map is not None:
            # Once per micro-batch: what is recomputed runs without gradients first.
            if self.training and torch.is_grad_enabled():
                self.expert_map.count(routing_map)
            probs, routing_map = self.expert_map.columns_by_slot(probs, routing_map)
        call: Any = copy(self.token_dispatcher)
        chosen = self._hot.choose(routing_map) if self._hot is not None else []
        if self._hot is not None and chosen:
            output = self._mix_with_copies(call, hidden, probs, routing_map, chosen)
            return output if shared is None else output + of_shared
        if not self._overlaps:
            call.launch_dispatch(hidden, routing_map, probs, lambda: None)
            saving: Any = (None, self._saving(call)) if self._saves_at_times else ()
            results, _ = self.experts(*call.wait_dispatch(), *saving)
            call.launch_combine(results)
        else:
            experts = cast(LaterGroupedExperts, self.experts)
            create = partial(experts.later_gradients, both=self._delays_both)
            if self._turns is not None:
                call.before_gradients = self._turns().in_backward
            last = self._saves_at_times or self._turns is not None
            later = call.launch_dispatch(hidden, routing_map, probs, create, create_last=last)
            saving = self._saving(call)
            inner = shared(first, half=1) if shared is not None else None
            self._take_turns()
            results, _ = experts(*call.wait_dispatch(), later, saving)
            call.launch_combine(results)
            of_shared = shared(inner, gate, half=2) if shared is not None else None
            self._take_turns()
        output = call.wait_combine()
        return output if shared is None else output + of_shared

    def _mix_with_copies(
        self, call: Any, hidden: Tensor, probs: Tensor, routing_map: Tensor, chosen: list[int]
    ) -> Tensor:
        """Return ``[s, b, h]``; rows of hot experts are computed while the others travel."""
        assert self._hot is not None
        experts: Any = self.experts
        copies = self._hot.copies(chosen, routing_map, probs)
        hidden = copies.at_input(hidden, experts.weight1, experts.weight2)
        call.launch_dispatch(hidden, copies.others, probs, lambda: None)
        here, _ = experts(copies.tokens(hidden), copies.rows, copies.probs, copies)
        results, _ = experts(*call.wait_dispatch())
        call.launch_combine(results)
        return copies.add(call.wait_combine(), here)

    def _take_turns(self) -> None:
        if self._turns is not None:
            self._turns().in_forward()

    @property
    def _saves_at_times(self) -> bool:
        """True when some calls send rows a second time."""
        return self._saves in (LEVEL0, LEVEL1) or self._crowded is not None

    def _saving(self, call: Any) -> Saving | None:
        """Return what is kept of a call whose rows are on their way, the same on all ranks."""
        if self.config.moe_apply_probs_on_input:
            return None
        level = self._saves
        if level == DISABLED and cast(LaterGroupedExperts, self.experts).activation_recompute:
            level = ACTIVATION
        if self._crowded is not None and torch.is_grad_enabled():
            scale, calls = self._crowded
            level = level_of_call(level, call.most_rows(), call.mean_rows(), scale, calls())
        return Saving(level, call.send_again)


def delaying_both_costs_nothing(config: TransformerConfig) -> bool:
    """Return whether both weight gradients of experts can wait for the exchange without a higher peak.

    While backward computes the gradient of the activation, the second one holds ``h + f`` numbers of a row.
    Every other layer of the rank keeps ``2 f`` numbers less than megatron-core's, which keeps what each
    operation of the activation reads.
    """
    width = (config.moe_ffn_hidden_size or 0) // (config.expert_tensor_parallel_size or 1)
    others = config.num_layers // config.pipeline_model_parallel_size - 1
    frequency = config.moe_layer_freq
    if isinstance(frequency, list):
        others = sum(frequency) // config.pipeline_model_parallel_size - 1
    elif frequency > 1:
        others //= frequency
    return config.gated_linear_unit and 2 * width * others >= config.hidden_size + width

"""megatron-core's dispatchers with communication that is launched in one place and waited for in another.

Numbers of rows are megatron-core's, and so are permutations unless they are fused. A layer takes a copy of
its dispatcher for each call: what belongs to one call (splits, routing map, exchanges) stays on that copy,
since several micro-batches may be between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import permute
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from torch import Tensor

from mindspeed_kernels.ops.npu_moe_token_permute_with_routing_map import (
    npu_moe_token_permute_with_routing_map,
)
from mindspeed_kernels.ops.npu_moe_token_unpermute_with_routing_map import (
    npu_moe_token_unpermute_with_routing_map,
)
from mindspeed_moe.launch_wait import AllGather, AllToAll, ReduceScatter

T = TypeVar("T")


class LaunchedAllToAllDispatcher(MoEAlltoAllTokenDispatcher):
    """Rows and their probabilities travel to the experts at the same time, results travel back.

    Attributes:
        before_gradients: of a call, called in backward before it waits for what it launched.
    """

    tokens_per_expert: Any
    before_gradients: Callable[[], None] | None = None

    def launch_dispatch(
        self,
        hidden: Tensor,
        routing_map: Tensor,
        probs: Tensor,
        create: Callable[[], T],
        *,
        create_last: bool = False,
    ) -> T:
        """Permute ``[s, b, h]`` and launch the exchanges to the experts.

        Args:
            hidden: ``[s, b, h]``.
            routing_map: bool ``[tokens, experts]``.
            probs: ``[tokens, experts]``.
            create: creates the nodes that backward reaches while gradients of rows are in flight.
            create_last: backward reaches them before it waits for gradients of probabilities too, since they
                wait for what was launched before those.

        Returns:
            The result of ``create``.
        """
        rows, row_probs = self.dispatch_preprocess(hidden, routing_map, probs)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_ep_alltoall", self.tokens_per_expert
        )
        received, sent = self._split(self.output_splits), self._split(self.input_splits)
        self._splits = received, sent
        self._tokens, self._token_probs = hidden.detach(), probs.detach()
        self._received = sum(received)
        self._there = AllToAll("dispatch", self.ep_group, received, sent)
        self._with_them = AllToAll("probs", self.ep_group, received, sent)
        self._back = AllToAll("combine", self.ep_group, sent, received)
        if self.before_gradients is not None:
            # Of gradients that are in flight together, those launched last are waited for first.
            self._with_them.before_gradients = self._back.before_gradients = self.before_gradients
        self._rows = self._there.launch(rows)
        if create_last:
            self._probs = self._with_them.launch(row_probs)
            return create()
        created = create()
        self._probs = self._with_them.launch(row_probs)
        return created

    def send_again(self, with_probs: bool) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Launch in backward what `launch_dispatch` sent, without gradients; returns what waits for it."""
        tokens = self._tokens.view(-1, self._tokens.shape[-1])
        rows, probs, _ = self._permute(tokens, self._token_probs if with_probs else None)
        of_rows = AllToAll("dispatch again", self.ep_group, *self._splits)
        of_probs = AllToAll("probs again", self.ep_group, *self._splits)
        of_rows.start(rows, mirrored=False)
        if probs is not None:
            of_probs.start(probs, mirrored=False)

        def arrive() -> tuple[Tensor, Tensor | None]:
            here = of_rows.finish()
            # The tensor beside the rows is sorted with them, whatever it holds.
            beside = of_probs.finish() if with_probs else here.new_zeros(here.shape[0])
            here, _, beside = self.dispatch_postprocess(here, beside)
            return here, beside if with_probs else None

        return arrive

    def most_rows(self) -> int:
        """Return how many rows come to the rank to which most come; every rank that exchanges has to ask."""
        here = self._received if self.output_splits_tp is None else int(sum(self.output_splits_tp))
        if self.output_splits_tp is None:
            here *= self.tp_size
        local = torch.tensor([here], device=self._tokens.device)
        return int(gather_from_sequence_parallel_region(local, group=self.tp_ep_group).max())

    def mean_rows(self) -> float:
        """Return the mean of the rows that come to a rank, before any is dropped."""
        tokens = self._tokens.shape[0] * self._tokens.shape[1]
        return tokens * int(self.config.moe_router_topk) * self.tp_size

    def wait_dispatch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows ``[m, h]`` sorted by local expert, their numbers ``[E]`` and probabilities ``[m]``."""
        rows, probs = self._there.wait(self._rows), self._with_them.wait(self._probs)
        # This object may live until backward, the buffers need not.
        del self._rows, self._probs
        found: tuple[Tensor, Tensor, Tensor] = self.dispatch_postprocess(rows, probs)
        return found

    def launch_combine(self, results: Tensor) -> None:
        """Launch the exchange of the experts' results ``[m, h]`` back to their tokens."""
        self._results = self._back.launch(self.combine_preprocess(results))

    def wait_combine(self) -> Tensor:
        """Return the sums of each token's results, ``[s, b, h]``."""
        results = self._back.wait(self._results)
        del self._results
        output: Tensor = self.combine_postprocess(results)
        return output

    def _permute(self, tokens: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return rows ``[m, h]`` of ``[tokens, h]`` by expert, their probabilities ``[m]``, and the order."""
        permuted: tuple[Tensor, Tensor | None, Tensor] = permute(
            tokens,
            self.routing_map,
            probs=probs,
            num_out_tokens=self.num_out_tokens,
            drop_and_pad=self.drop_and_pad,
        )
        return permuted

    def _split(self, splits: Any) -> list[int]:
        """Return numbers of rows as integers; without any each rank gets the capacity of its experts."""
        if splits is None and self.drop_and_pad:
            assert self.capacity is not None
            return [self.capacity * self.num_local_experts] * self.ep_size
        if splits is None:
            return [int(self.num_out_tokens)]
        return [int(rows) for rows in splits]


class FusedAllToAllDispatcher(LaunchedAllToAllDispatcher):
    """Tokens are sorted by expert, and results brought back, by one kernel each."""

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return rows ``[m, h]`` of ``[s, b, h]`` sorted by expert, and their probabilities ``[m]``."""
        self.hidden_shape = hidden_states.shape
        self.probs, self.routing_map = probs, routing_map
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_permutation_1", self.preprocess(routing_map)
        )
        rows, row_probs, self._order = self._permute(tokens, probs)
        assert row_probs is not None
        return rows, row_probs

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Return the sums of each token's results, ``[s, b, h]``, from ``[m, h]``."""
        width = self.hidden_shape[-1]
        sums: Tensor = npu_moe_token_unpermute_with_routing_map(
            permutated_local_input_tokens,
            self._order,
            (self.routing_map.shape[0], width),
            drop_and_pad=bool(self.drop_and_pad),
        )
        return sums.view(self.hidden_shape)

    def _permute(self, tokens: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        permuted: tuple[Tensor, Tensor | None, Tensor] = npu_moe_token_permute_with_routing_map(
            tokens,
            self.routing_map,
            probs=probs,
            num_out_tokens=int(self.num_out_tokens),
            drop_and_pad=bool(self.drop_and_pad),
        )
        return permuted


class LaunchedAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Routing map, probabilities and rows of all ranks are gathered at the same time; sums go back."""

    routing_map: Any

    def launch_dispatch(
        self,
        hidden: Tensor,
        routing_map: Tensor,
        probs: Tensor,
        create: Callable[[], T],
        *,
        create_last: bool = False,
    ) -> T:
        """Launch the gathering of what every rank has; see `LaunchedAllToAllDispatcher`."""
        self._tokens, self._token_probs = hidden.detach(), probs.detach()
        self._chosen = routing_map
        rows, probs = self.dispatch_preprocess(hidden, routing_map, probs)
        self._of_map = AllGather("map", self.tp_ep_group)
        self._with_them = AllGather("probs", self.tp_ep_group)
        self._there = AllGather("dispatch", self.tp_ep_group)
        self._back = ReduceScatter("combine", self.tp_ep_group)
        self._map = self._of_map.launch(self.routing_map)
        self._probs = self._with_them.launch(probs)
        self._rows = self._there.launch(rows)
        return create()

    def send_again(self, with_probs: bool) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Gather in backward what `launch_dispatch` gathered; see `LaunchedAllToAllDispatcher`."""
        of_probs, of_rows = (AllGather(name, self.tp_ep_group) for name in ("probs again", "dispatch again"))
        if with_probs:
            of_probs.start(self._token_probs, mirrored=False)
        of_rows.start(self._tokens.view(-1, self._tokens.shape[-1]), mirrored=False)

        def arrive() -> tuple[Tensor, Tensor | None]:
            probs = None
            if with_probs:
                first, last = self.local_expert_indices[0], self.local_expert_indices[-1]
                local = of_probs.finish()[:, first : last + 1]
                probs = local.T.contiguous().masked_select(self.local_map.T.contiguous())
            return of_rows.finish().index_select(0, self.reversed_local_input_permutation_mapping), probs

        return arrive

    def most_rows(self) -> int:
        """Return how many rows come to the rank to which most come; every rank that exchanges has to ask."""
        local = self._chosen.sum(0)
        counts = gather_from_sequence_parallel_region(local, group=self.tp_ep_group)
        return int(counts.view(-1, self.ep_size, local.numel() // self.ep_size).sum((0, 2)).max())

    def mean_rows(self) -> float:
        """Return the mean of the rows that come to a rank, before any is dropped."""
        tokens = self._tokens.shape[0] * self._tokens.shape[1]
        return tokens * int(self.config.moe_router_topk) * self.tp_ep_group.size() / self.ep_size

    def wait_dispatch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows ``[m, h]`` sorted by local expert, their numbers ``[E]`` and probabilities ``[m]``."""
        self.routing_map = self._of_map.wait(self._map)
        probs, rows = self._with_them.wait(self._probs), self._there.wait(self._rows)
        del self._map, self._probs, self._rows
        found: tuple[Tensor, Tensor, Tensor] = self.dispatch_postprocess(rows, probs)
        return found

    def launch_combine(self, results: Tensor) -> None:
        """Launch the sums over ranks of each token's results, from ``[m, h]``."""
        sums = self.combine_preprocess(results)
        self._dtype = sums.dtype
        self._results = self._back.launch(sums.to(self.local_probs.dtype))
        del self.local_probs

    def wait_combine(self) -> Tensor:
        """Return the sums of each token's results, ``[s, b, h]``."""
        sums = self._back.wait(self._results)
        del self._results
        output: Tensor = self.combine_postprocess(sums.to(self._dtype))
        return output


LaunchedDispatcher = LaunchedAllToAllDispatcher | LaunchedAllGatherDispatcher

DISPATCHERS: dict[str, type[LaunchedDispatcher]] = {
    "alltoall": LaunchedAllToAllDispatcher,
    "allgather": LaunchedAllGatherDispatcher,
}
"""By the value of ``moe_token_dispatcher_type``."""

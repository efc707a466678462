"""megatron-core's dispatchers with communication that is launched in one place and waited for in another.

Permutations and numbers of rows are megatron-core's. A layer takes a copy of its dispatcher for each call:
what belongs to one call (splits, routing map, exchanges) stays on that copy, since several micro-batches may
be between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megatron.core.transformer.moe.moe_utils import permute
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from torch import Tensor

from mindspeed_moe.launch_wait import AllGather, AllToAll, ReduceScatter

T = TypeVar("T")


class LaunchedAllToAllDispatcher(MoEAlltoAllTokenDispatcher):
    """Rows and their probabilities travel to the experts at the same time, results travel back."""

    tokens_per_expert: Any

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
        self._there = AllToAll("dispatch", self.ep_group, received, sent)
        self._with_them = AllToAll("probs", self.ep_group, received, sent)
        self._back = AllToAll("combine", self.ep_group, sent, received)
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
        rows, probs, _ = permute(
            tokens,
            self.routing_map,
            probs=self._token_probs if with_probs else None,
            num_out_tokens=self.num_out_tokens,
            drop_and_pad=self.drop_and_pad,
        )
        of_rows = AllToAll("dispatch again", self.ep_group, *self._splits)
        of_probs = AllToAll("probs again", self.ep_group, *self._splits)
        of_rows.start(rows, mirrored=False)
        if with_probs:
            of_probs.start(probs, mirrored=False)

        def arrive() -> tuple[Tensor, Tensor | None]:
            here = of_rows.finish()
            # The tensor beside the rows is sorted with them, whatever it holds.
            beside = of_probs.finish() if with_probs else here.new_zeros(here.shape[0])
            here, _, beside = self.dispatch_postprocess(here, beside)
            return here, beside if with_probs else None

        return arrive

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

    def _split(self, splits: Any) -> list[int]:
        """Return numbers of rows as integers; without any each rank gets the capacity of its experts."""
        if splits is None and self.drop_and_pad:
            assert self.capacity is not None
            return [self.capacity * self.num_local_experts] * self.ep_size
        if splits is None:
            return [int(self.num_out_tokens)]
        return [int(rows) for rows in splits]


class LaunchedAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Routing map, probabilities and rows of all ranks are gathered at the same time; sums go back."""

    routing_map: Any

    def launch_dispatch(
        self, hidden: Tensor, routing_map: Tensor, probs: Tensor, create: Callable[[], T]
    ) -> T:
        """Launch the gathering of what every rank has; see `LaunchedAllToAllDispatcher`."""
        rows, probs = self.dispatch_preprocess(hidden, routing_map, probs)
        self._of_map = AllGather("map", self.tp_ep_group)
        self._with_them = AllGather("probs", self.tp_ep_group)
        self._there = AllGather("dispatch", self.tp_ep_group)
        self._back = ReduceScatter("combine", self.tp_ep_group)
        self._map = self._of_map.launch(self.routing_map)
        self._probs = self._with_them.launch(probs)
        self._rows = self._there.launch(rows)
        return create()

    def wait_dispatch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows ``[m, h]`` sorted by local expert, their numbers ``[E]`` and probabilities ``[m]``."""
        self.routing_map = self._of_map.wait(self._map)
        probs, rows = self._with_them.wait(self._probs), self._there.wait(self._rows)
        found: tuple[Tensor, Tensor, Tensor] = self.dispatch_postprocess(rows, probs)
        return found

    def launch_combine(self, results: Tensor) -> None:
        """Launch the sums over ranks of each token's results, from ``[m, h]``."""
        sums = self.combine_preprocess(results)
        self._dtype = sums.dtype
        self._results = self._back.launch(sums.to(self.local_probs.dtype))

    def wait_combine(self) -> Tensor:
        """Return the sums of each token's results, ``[s, b, h]``."""
        output: Tensor = self.combine_postprocess(self._back.wait(self._results).to(self._dtype))
        return output


LaunchedDispatcher = LaunchedAllToAllDispatcher | LaunchedAllGatherDispatcher

DISPATCHERS: dict[str, type[LaunchedDispatcher]] = {
    "alltoall": LaunchedAllToAllDispatcher,
    "allgather": LaunchedAllGatherDispatcher,
}
"""By the value of ``moe_token_dispatcher_type``."""

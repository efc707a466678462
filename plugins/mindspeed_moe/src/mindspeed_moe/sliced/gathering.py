"""A dispatcher whose rows are gathered over the ranks of a cut expert by calls of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_moe.dispatchers import LaunchedAllToAllDispatcher
from mindspeed_moe.gathered_groups import turned
from mindspeed_moe.launch_wait import GatherRows, ReduceRows


class GatheringDispatcher(LaunchedAllToAllDispatcher):
    """Gathers and scatters of sums are launched in one place and waited for in another."""

    def launch_gather(self) -> None:
        """Wait for the rows that were exchanged, and launch their gather."""
        rows, probs = self._there.wait(self._rows), self._with_them.wait(self._probs)
        self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        if self.drop_and_pad:
            each = int(self.capacity or 0)
            self._numbers = torch.full((self.tp_size * self.ep_size, self.num_local_experts), each)
        elif self.num_local_experts > 1:
            self._numbers = self.num_global_tokens_per_local_expert.view(-1, self.num_local_experts)
        else:
            # With one expert of a rank megatron-core counts by rank only.
            self._numbers = torch.tensor(self._split(self.output_splits_tp)).view(-1, 1)
        of_ranks = self._numbers.view(self.tp_size, -1).sum(1).tolist()
        self._gather = GatherRows("gather", self.tp_group, of_ranks)
        self._gather_probs = GatherRows("gather probs", self.tp_group, of_ranks)
        self._scatter = ReduceRows("scatter", self.tp_group, of_ranks)
        self._rows, self._probs = self._gather.launch(rows), self._gather_probs.launch(probs)

    def wait_dispatch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows ``[m, h]`` sorted by local expert, their numbers ``[E]`` and probabilities ``[m]``."""
        rows, probs = self._gather.wait(self._rows), self._gather_probs.wait(self._probs)
        # This object may live until backward, the buffers need not.
        del self._rows, self._probs
        counts, outer = self._numbers.flatten().tolist(), self._numbers.shape[0]
        return turned(rows, counts, outer), self._numbers.sum(0), turned(probs, counts, outer)

    def launch_scatter(self, results: Tensor) -> None:
        """Launch the scatter of sums of the experts' results ``[m, h]``."""
        counts = self._numbers.t().flatten().tolist()
        self._results = self._scatter.launch(turned(results, counts, self.num_local_experts))

    def launch_combine_of_sums(self) -> None:
        """Wait for the sums, and launch their exchange back to their tokens."""
        self._results = self._back.launch(self._scatter.wait(self._results))

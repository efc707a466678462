"""A training step on a rank with copies of hot experts, its rows recorded, for tests."""

from __future__ import annotations

from unittest.mock import patch

from megatron.core.transformer.moe.router import TopKRouter
from moved_experts import mostly_to_the_first

from mindspeed_core.activation import activate
from mindspeed_moe import experts
from mindspeed_moe.expert_map.copies import HotExperts
from mindspeed_moe.expert_map.planning import rows_with_copies
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop


def one_step(flags):
    """Train a step; returns planned and computed rows of this rank by call, and names of the state."""
    planned, computed = [], []
    choose, forward = HotExperts.choose, experts.CopiedExperts.forward

    def new_choose(self, routing_map):
        from mindspeed_core.runtime.gather import all_gather_values

        counts = all_gather_values(routing_map.sum(0).tolist(), self._group)
        rank = self._group.rank()
        planned.append((rows_with_copies(counts, 0)[rank], rows_with_copies(counts, self._number)[rank]))
        computed.append(0)
        return choose(self, routing_map)

    def new_forward(self, rows, *args):
        computed[-1] += rows.shape[0]
        return forward(self, rows, *args)

    with (
        patch.object(TopKRouter, "gating", mostly_to_the_first(TopKRouter.gating)),
        patch.object(HotExperts, "choose", new_choose),
        patch.object(experts.CopiedExperts, "forward", new_forward),
    ):
        session = activate(training_flags(flags, 1), host="standalone")
        try:
            run = loop.setup(session)
            session.call("train_step", run=run)
            names = [name for chunk in run.model for name in chunk.module.state_dict()]
            sizes = sum(buffer.numel for chunk in run.model for buffer in chunk.expert_parallel_buffers)
            loop.teardown(session)
        finally:
            session.close()
    return planned, computed, names, sizes

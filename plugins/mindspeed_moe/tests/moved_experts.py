"""Training steps on a rank whose experts move, for tests."""

from __future__ import annotations

import random
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from mindspeed_core.activation import activate
from mindspeed_moe.expert_map import migration, rebalancing
from mindspeed_testing.canonical import canonical_parameters
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop


def mostly_to_the_first(original):
    """Favour experts 0 and 1."""

    def gating(self, hidden):
        logits = original(self, hidden)
        favour = torch.zeros_like(logits)
        favour[..., :2] = 2.0
        return logits + favour

    return gating


def anywhere(self, frequency):
    """Plan a random placement, the same on every rank and another one each time."""
    order = list(range(len(self.loads)))
    random.Random(f"{self.key} {self.loads}").shuffle(order)
    slots = len(self.map.home[0])
    return [order[first : first + slots] for first in range(0, len(order), slots)]


def trained(flags, steps, buffer_bytes=migration.BUFFER_BYTES):
    """Train with random moves; returns losses and norms, parameters, moves, largest exchange, placements."""
    owners, sizes = [], []
    init, exchange = rebalancing.Rebalancing.__init__, dist.all_to_all_single

    def new_init(self, *args):
        init(self, *args)
        owners.append(self)

    def new_exchange(output, rows, *args, **options):
        if rows.dim() == 3:
            sizes.append(max(rows.nbytes, output.nbytes))
        return exchange(output, rows, *args, **options)

    with (
        patch.object(TopKRouter, "gating", mostly_to_the_first(TopKRouter.gating)),
        patch.object(rebalancing.Rebalancing, "__init__", new_init),
        patch.object(rebalancing.Layer, "planned", anywhere),
        patch.object(dist, "all_to_all_single", new_exchange),
        patch.object(migration, "BUFFER_BYTES", buffer_bytes),
    ):
        session = activate(training_flags(flags, steps), host="standalone")
        try:
            run = loop.setup(session)
            session.call("start_run", run=run)
            results = [session.call("train_step", run=run) for _ in range(steps)]
            numbers = [number for step in results for number in (step.losses["lm loss"], step.grad_norm)]
            state = canonical_parameters(run)
            loop.teardown(session)
        finally:
            session.close()
    moves = owners[0].moves if owners else 0
    placements = [layer.map.placement for owner in owners for layer in owner._layers]
    return numbers, state and state.tensors, moves, max(sizes, default=0), placements


def without_and_with_moves(flags, moves, steps, buffer_bytes):
    """Train both ways in one process."""
    return trained(flags, steps), trained((*flags, *moves), steps, buffer_bytes)

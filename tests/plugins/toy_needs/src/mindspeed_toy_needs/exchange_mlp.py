"""MLP shards swapped between tensor-parallel ranks, together with the optimizer's state.

An MLP is a sum over its hidden channels, so it does not matter which rank computes which of them, as long as
both linear layers agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

if TYPE_CHECKING:
    from mindspeed_core.run import Run


@torch.no_grad()
def exchange(run: Run) -> None:
    """Swap with the tensor-parallel rank that has the mirrored position."""
    group = run.pg.tp
    partner = group.size() - 1 - group.rank()
    if partner == group.rank():
        return
    for tensor in _shards(run):
        received = torch.empty_like(tensor)
        messages = [
            dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=partner),
            dist.P2POp(dist.irecv, received, group=group, group_peer=partner),
        ]
        for message in dist.batch_isend_irecv(messages):
            message.wait()
        tensor.copy_(received)


def _shards(run: Run) -> Iterator[torch.Tensor]:
    assert run.optimizer is not None
    states = [part.optimizer.state for part in run.optimizer.chained_optimizers]
    for chunk in unwrap_model(run.model):
        for layer in chunk.decoder.layers:
            first, second = layer.mlp.linear_fc1, layer.mlp.linear_fc2
            for parameter in (first.weight, first.bias, second.weight):
                yield parameter.data
                for state in states:
                    for moment in ("exp_avg", "exp_avg_sq"):
                        if moment in state.get(parameter, {}):
                            yield state[parameter][moment]

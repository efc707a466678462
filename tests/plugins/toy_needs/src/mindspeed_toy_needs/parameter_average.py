"""A moving average of the parameters, described for checkpoints by the layout of the parameters themselves.

A model says in ``sharded_state_dict`` where each local tensor sits in the global one; the average sits at the
same place under a name of its own, so that every layout can load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.utils import unwrap_model

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

Average = list[dict[str, torch.Tensor]]


def copies(model: list[MegatronModule]) -> Average:
    """The average at the start of training: each chunk's parameters by name."""
    return [
        {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
        for chunk in unwrap_model(model)
    ]


@torch.no_grad()
def update(average: Average, model: list[MegatronModule], decay: float) -> None:
    """Move the average towards the parameters."""
    for kept, chunk in zip(average, unwrap_model(model)):
        for name, parameter in chunk.named_parameters():
            kept[name].lerp_(parameter, 1 - decay)


def sharded(average: Average, model: list[MegatronModule]) -> dict[str, Any]:
    """The average as ``ShardedTensor`` by chunk and name."""
    state: dict[str, Any] = {}
    for index, (kept, chunk) in enumerate(zip(average, unwrap_model(model))):
        described = chunk.sharded_state_dict()
        state[f"chunk {index}"] = {
            name: replace(entry, key=f"toy-average.{entry.key}", data=kept[name])
            for name, entry in described.items()
            if isinstance(entry, ShardedTensor) and name in kept
        }
    return state


@torch.no_grad()
def restore(average: Average, state: Mapping[str, Any]) -> None:
    """Take loaded tensors over; a checkpoint without them leaves the average alone."""
    for index, kept in enumerate(average):
        for name, tensor in state.get(f"chunk {index}", {}).items():
            kept[name].copy_(tensor)

"""Gradients reduced over a group that megatron-core does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core.utils import unwrap_model

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


def add_up(model: list[MegatronModule], group: dist.ProcessGroup) -> None:
    """Add up the finished gradient of the final norm."""
    for chunk in unwrap_model(model):
        if chunk.decoder.final_layernorm is not None:
            for parameter in chunk.decoder.final_layernorm.parameters():
                dist.all_reduce(parameter.main_grad, group=group)

"""Biases of routers, which megatron-core before 0.16 leaves as the memory was."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import Router

from mindspeed_megatron.corrections import holds


def draw_router_biases(chunk: torch.nn.Module, config: Any, seed: int) -> None:
    """Draw the bias of every router of a new chunk, the same on all ranks and in every layout.

    Args:
        chunk: on the CPU or another device.
        config: says how values are drawn.
        seed: of the model.
    """
    if not holds("router-bias") or not config.perform_initialization:
        return
    for router in chunk.modules():
        bias = router.bias if isinstance(router, Router) else None
        if bias is not None:
            number: Any = router.layer_number
            with torch.random.fork_rng(devices=[bias.device] if bias.is_cuda else []):
                torch.manual_seed(seed + (number or 0))
                config.init_method(bias)

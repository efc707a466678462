"""A further score of every row, without value, under the name and in the shards that megatron-core gives it.

``--softmax-type off-by-one`` makes it zero, ``learnable`` a parameter for each head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import nn


def add_offset(module: nn.Module, config: TransformerConfig, heads_group: Callable[[], Any]) -> None:
    """Give a core attention ``softmax_offset``, ``[n / tp]`` or None, by the kind that its configuration has.

    Raises:
        ValueError: there is no such kind.
    """
    kind = getattr(config, "softmax_type", "vanilla")
    if kind == "vanilla":
        module.register_parameter("softmax_offset", None)
        return
    if kind not in ("off-by-one", "learnable"):
        raise ValueError(f"--softmax-type {kind} is none of vanilla, off-by-one, learnable")
    offset = torch.zeros(config.num_attention_heads // heads_group().size(), dtype=config.params_dtype)
    if kind == "off-by-one":
        module.register_buffer("softmax_offset", offset, persistent=False)
        return
    learned = nn.Parameter(offset)
    # Each rank has those of its heads, which the gradient norm counts everywhere.
    set_tensor_model_parallel_attributes(learned, True, 0, 1)
    module.register_parameter("softmax_offset", learned)
    if config.perform_initialization:
        config.init_method(learned)

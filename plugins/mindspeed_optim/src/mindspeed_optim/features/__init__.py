"""The declarations of mindspeed-optim; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_optim.features.fused_adamw import FusedAdamWOptimizer

DECLARATIONS = (
    HookApi("1.3"),
    FusedAdamWOptimizer,
)

__all__ = ["DECLARATIONS", "FusedAdamWOptimizer"]

"""The features that change what the optimizer keeps, and where, and how memory is handed out."""

from __future__ import annotations

from mindspeed_core.feature import Feature
from mindspeed_memory.features.block_optimizer import BlockOptimizer
from mindspeed_memory.features.reuse_fp32_param import ReuseFp32Param

OPTIMIZER_FEATURES: tuple[type[Feature], ...] = (BlockOptimizer, ReuseFp32Param)

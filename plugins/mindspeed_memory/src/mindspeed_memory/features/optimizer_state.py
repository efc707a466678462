"""The features that change what the optimizer keeps, and where, how memory is handed out, and its report."""

from __future__ import annotations

from mindspeed_core.feature import Feature
from mindspeed_memory.features.block_optimizer import BlockOptimizer
from mindspeed_memory.features.compress_optimizer import CompressOptimizer
from mindspeed_memory.features.memory_fragmentation import MemoryFragmentation
from mindspeed_memory.features.memory_report import MemoryReport
from mindspeed_memory.features.release_fp32_grad import ReleaseFp32Grad
from mindspeed_memory.features.reuse_fp32_param import ReuseFp32Param
from mindspeed_memory.features.swap_optimizer import SwapOptimizer
from mindspeed_memory.features.virtual_optimizer import VirtualOptimizer

OPTIMIZER_FEATURES: tuple[type[Feature], ...] = (
    BlockOptimizer,
    ReuseFp32Param,
    ReleaseFp32Grad,
    SwapOptimizer,
    VirtualOptimizer,
    CompressOptimizer,
    MemoryFragmentation,
    MemoryReport,
)

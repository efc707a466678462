"""What mindspeed-cp declares; importing it loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import ExtensionPoint
from mindspeed_cp.features.context_parallel import ContextParallel
from mindspeed_cp.features.predictions import SplitPredictions

DECLARATIONS = (
    ExtensionPoint(
        name="cp.block_kernels",
        group="mindspeed_cp.block_kernels",
        summary="instances of mindspeed_cp.engine.kernels.BlockKernel: attention of some rows to some keys",
        check="mindspeed_cp.engine.kernels.choice:check_kernel",
    ),
    ContextParallel,
    SplitPredictions,
)

__all__ = ["DECLARATIONS", "ContextParallel", "SplitPredictions"]

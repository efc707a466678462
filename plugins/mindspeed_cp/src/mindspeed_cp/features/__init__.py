"""What mindspeed-cp declares; importing it loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import ExtensionPoint, StageSpecs
from mindspeed_cp.features.context_parallel import ContextParallel
from mindspeed_cp.features.documents import PackedDocuments
from mindspeed_cp.features.predictions import SplitPredictions

DECLARATIONS = (
    ExtensionPoint(
        name="cp.block_kernels",
        group="mindspeed_cp.block_kernels",
        summary="instances of mindspeed_cp.engine.kernels.BlockKernel: attention of some rows to some keys",
        check="mindspeed_cp.engine.kernels.choice:check_kernel",
    ),
    ExtensionPoint(
        name="cp.planners",
        group="mindspeed_cp.planners",
        summary="functions from the number of ranks and the arguments to a mindspeed_cp.engine.planners.Grid",
        check="mindspeed_cp.planner_choice:check_planner",
    ),
    StageSpecs(
        module="mindspeed_cp.stages",
        stages=("cp_mask_rule",),
        summary="what the queries of a micro-batch see",
    ),
    ContextParallel,
    PackedDocuments,
    SplitPredictions,
)

__all__ = ["DECLARATIONS", "ContextParallel", "PackedDocuments", "SplitPredictions"]

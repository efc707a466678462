"""The declarations of mindspeed-cp; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi, StageSpecs
from mindspeed_cp.extension_points import BLOCK_KERNELS, PLANNERS
from mindspeed_cp.features.context_parallel import ContextParallel
from mindspeed_cp.features.documents import PackedDocuments
from mindspeed_cp.features.predictions import SplitPredictions

DECLARATIONS = (
    HookApi("1.3"),
    BLOCK_KERNELS,
    PLANNERS,
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

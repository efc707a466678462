"""The declarations of mindspeed-tp; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_tp.features.coc import ChunkedProducts, FusedProducts
from mindspeed_tp.features.core import PlannedLinears
from mindspeed_tp.features.gathered_state import SlicedGather
from mindspeed_tp.features.grid import TwoDimensional
from mindspeed_tp.features.group_options import GroupOptions
from mindspeed_tp.features.log_reduction import AsynchronousLog
from mindspeed_tp.features.recompute import RecomputeCommunication
from mindspeed_tp.features.uneven import UnevenLinears
from mindspeed_tp.features.upstream import GatedFusion
from mindspeed_tp.features.vocabulary import ChunkedLoss, VocabularyEmbedding

DECLARATIONS = (
    HookApi("1.3"),
    PlannedLinears,
    ChunkedProducts,
    FusedProducts,
    RecomputeCommunication,
    TwoDimensional,
    UnevenLinears,
    VocabularyEmbedding,
    ChunkedLoss,
    GatedFusion,
    AsynchronousLog,
    GroupOptions,
    SlicedGather,
)

__all__ = [
    "DECLARATIONS",
    "AsynchronousLog",
    "ChunkedLoss",
    "ChunkedProducts",
    "FusedProducts",
    "GatedFusion",
    "GroupOptions",
    "PlannedLinears",
    "RecomputeCommunication",
    "SlicedGather",
    "TwoDimensional",
    "UnevenLinears",
    "VocabularyEmbedding",
]

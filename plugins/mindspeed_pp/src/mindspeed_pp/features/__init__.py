"""The declarations of mindspeed-pp; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_pp.extension_points import ACTIONS, SCHEDULES
from mindspeed_pp.features.chimera import Chimera
from mindspeed_pp.features.engine import PipelineSchedule
from mindspeed_pp.features.microbatches import MicrobatchSizes
from mindspeed_pp.features.multi_parameter import MultiParameter
from mindspeed_pp.features.partition import NoopKeys, NoopLayers, NumLayerList, UnalignedPipeline
from mindspeed_pp.features.random_states import RandomPerMicrobatch
from mindspeed_pp.features.weight_gradients import LaterWeightGradients

DECLARATIONS = (
    HookApi("1.3"),
    SCHEDULES,
    ACTIONS,
    PipelineSchedule,
    LaterWeightGradients,
    Chimera,
    MicrobatchSizes,
    MultiParameter,
    RandomPerMicrobatch,
    NoopLayers,
    NoopKeys,
    UnalignedPipeline,
    NumLayerList,
)

__all__ = [
    "DECLARATIONS",
    "Chimera",
    "LaterWeightGradients",
    "MicrobatchSizes",
    "MultiParameter",
    "NoopKeys",
    "NoopLayers",
    "NumLayerList",
    "PipelineSchedule",
    "RandomPerMicrobatch",
    "UnalignedPipeline",
]

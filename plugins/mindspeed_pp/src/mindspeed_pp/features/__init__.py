"""The declarations of mindspeed-pp; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_pp.extension_points import ACTIONS, SCHEDULES
from mindspeed_pp.features.engine import PipelineSchedule
from mindspeed_pp.features.partition import NoopLayers, NumLayerList, UnalignedPipeline
from mindspeed_pp.features.random_states import RandomPerMicrobatch
from mindspeed_pp.features.weight_gradients import LaterWeightGradients

DECLARATIONS = (
    HookApi("1.2"),
    SCHEDULES,
    ACTIONS,
    PipelineSchedule,
    LaterWeightGradients,
    RandomPerMicrobatch,
    NoopLayers,
    UnalignedPipeline,
    NumLayerList,
)

__all__ = [
    "DECLARATIONS",
    "LaterWeightGradients",
    "NoopLayers",
    "NumLayerList",
    "PipelineSchedule",
    "RandomPerMicrobatch",
    "UnalignedPipeline",
]

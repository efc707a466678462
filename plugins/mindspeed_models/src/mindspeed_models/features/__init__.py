"""The declarations of mindspeed-models; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_models.features.instructions import InstructionData
from mindspeed_models.features.packing import PackSamples

DECLARATIONS = (HookApi("1.3"), InstructionData, PackSamples)

__all__ = ["DECLARATIONS", "InstructionData", "PackSamples"]

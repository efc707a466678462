"""The declarations of mindspeed-optim; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_optim.features.fused_adamw import FusedAdamWOptimizer
from mindspeed_optim.features.muon import MuonOptimizer
from mindspeed_optim.features.presets import QuantGrads, ZeroStage

DECLARATIONS = (
    HookApi("1.3"),
    FusedAdamWOptimizer,
    MuonOptimizer,
    ZeroStage,
    QuantGrads,
)

__all__ = ["DECLARATIONS", "FusedAdamWOptimizer", "MuonOptimizer", "QuantGrads", "ZeroStage"]

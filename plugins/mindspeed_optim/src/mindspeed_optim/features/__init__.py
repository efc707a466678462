"""The declarations of mindspeed-optim; importing them loads neither torch nor megatron."""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_optim.features.cadam import CAdamOptimizer
from mindspeed_optim.features.ema import EmaOptimizer
from mindspeed_optim.features.fused_adamw import FusedAdamWOptimizer
from mindspeed_optim.features.muon import MuonOptimizer
from mindspeed_optim.features.presets import QuantGrads, ZeroStage
from mindspeed_optim.features.quant_states import QuantStates

DECLARATIONS = (
    HookApi("1.3"),
    FusedAdamWOptimizer,
    MuonOptimizer,
    CAdamOptimizer,
    EmaOptimizer,
    QuantStates,
    ZeroStage,
    QuantGrads,
)

__all__ = [
    "DECLARATIONS",
    "CAdamOptimizer",
    "EmaOptimizer",
    "FusedAdamWOptimizer",
    "MuonOptimizer",
    "QuantGrads",
    "QuantStates",
    "ZeroStage",
]

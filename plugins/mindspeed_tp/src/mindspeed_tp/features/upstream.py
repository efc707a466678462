"""Declarations of flags of older scripts that ask for what is always so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_core.feature import Feature, Flag
from mindspeed_tp.features.proofs import SHARDED, SP, TP2, as_without, resumed

_FUSION = ("--mlp-layer-fusion",)
FUSION_PROOFS = (as_without("tp2-sp", _FUSION, *TP2, *SP), resumed(_FUSION, *TP2, *SP, *SHARDED))


class GatedFusion(Feature):
    """The two halves of a gated feed-forward module are one linear, as always in megatron-core."""

    name = "mlp-layer-fusion"
    family = "tp"
    summary = "Accept --mlp-layer-fusion of older scripts; gate and up are always one GEMM"
    level = 0
    flags = (
        Flag(
            "--mlp-layer-fusion", help="Accepted without effect: gate and up projection are always one GEMM."
        ),
    )
    docs = "mindspeed_tp:docs/mlp-layer-fusion.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = FUSION_PROOFS

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Say that it is always so."""
        return {"--mlp-layer-fusion": "gate and up projection are one product, with and without it"}

"""Proof that a flag of older scripts changes nothing."""

from __future__ import annotations

from mindspeed_tp.features.proofs import SHARDED, SP, TP2, as_without, resumed

_FUSION = ("--mlp-layer-fusion",)
FUSION_PROOFS = (as_without("tp2-sp", _FUSION, *TP2, *SP), resumed(_FUSION, *TP2, *SP, *SHARDED))

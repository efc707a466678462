"""Proofs of losses that are summed beside the update: the same numbers."""

from __future__ import annotations

from mindspeed_core.feature import Gain
from mindspeed_tp.features.proofs import (
    BOTH_OVERLAPS,
    INTERLEAVED,
    PP2,
    SP,
    TP2,
    as_on_one,
    as_without,
    resumed,
)

_LOG = ("--async-log-allreduce",)
_EXPERTS = (
    *("--num-experts", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "0.001"),
)
_PREDICTIONS = ("--mtp-num-layers", "2", "--untie-embeddings-and-output-weights")
LOG_PROOFS = (
    as_without("dp2", _LOG, gains=(Gain("collective_calls", 1.0),)),
    as_without("tp2", _LOG, *TP2, *SP),
    as_without("dp2-pp2", _LOG, *PP2, ranks=4, gains=(Gain("collective_calls", 1.0),)),
    as_without("interleaved", _LOG, *INTERLEAVED),
    as_without("experts", _LOG, *TP2, *SP, *_EXPERTS, gains=(Gain("collective_calls", 1.0),)),
    as_without("experts-dp2-pp2", _LOG, *PP2, *_EXPERTS, ranks=4, gains=(Gain("collective_calls", 1.0),)),
    as_without("predictions", _LOG, *TP2, *SP, *_PREDICTIONS),
    as_on_one("one-process", _LOG, *BOTH_OVERLAPS, both=("--calculate-per-token-loss",)),
    resumed(_LOG, *BOTH_OVERLAPS),
)

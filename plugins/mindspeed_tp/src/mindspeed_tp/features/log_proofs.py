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
LOG_PROOFS = (
    as_without("dp2", _LOG, gains=(Gain("collective_calls", 1.0),)),
    as_without("tp2", _LOG, *TP2, *SP),
    as_without("dp2-pp2", _LOG, *PP2, ranks=4, gains=(Gain("collective_calls", 1.0),)),
    as_without("interleaved", _LOG, *INTERLEAVED),
    as_on_one("one-process", _LOG, *BOTH_OVERLAPS, both=("--calculate-per-token-loss",)),
    resumed(_LOG, *BOTH_OVERLAPS),
)

"""The declaration of the fused cross entropy."""

from __future__ import annotations

from typing import Any

from mindspeed_core.feature import Conflict, Flag, Gain, hookimpl
from mindspeed_kernels.features.proofs import (
    PP2,
    RECOMPUTE,
    STEADY,
    SWITCHED,
    TP2,
    KernelFeature,
    across,
    scenarios,
)

_FLAG = "--use-fused-cross-entropy"
_WIDE = (*STEADY, "--vocab-size", "4096")


class FusedCrossEntropy(KernelFeature):
    """Losses from logits as they are, without a float32 copy of them."""

    name = "fused-cross-entropy"
    summary = "Compute losses from 16-bit logits without a float32 copy"
    flags = (Flag(_FLAG, help="Fused cross entropy that keeps the logits as they are."),)
    conflicts = (
        Conflict(flag="--cross-entropy-loss-fusion", reason="it is another one; drop one of the two"),
        Conflict(flag="--fp16-lm-cross-entropy", reason="losses are computed in float32; drop it"),
    )
    slots = ("lm-loss",)
    docs = "mindspeed_kernels:docs/fused-cross-entropy.md"
    tuning = {_FLAG: SWITCHED}
    verify = (
        *scenarios(_FLAG, _WIDE, gain=(Gain("peak_bytes", 1.0),)),
        *across(
            (_FLAG,),
            (),
            (
                ("tp2", ("--tensor-model-parallel-size", "2"), 2),
                ("tp2-pp2", (*TP2, *PP2), 4),
                ("predictions", ("--mtp-num-layers", "1"), 1),
                ("recompute", RECOMPUTE, 1),
                ("per-token-loss", ("--calculate-per-token-loss", "--global-batch-size", "8"), 1),
            ),
            model=STEADY,
        ),
    )

    @hookimpl
    def compute_token_losses(self, run: Any, logits: Any, labels: Any) -> Any:
        """Compute the losses."""
        from mindspeed_kernels.modules.cross_entropy import token_losses

        return token_losses(logits, labels, run.pg.tp)

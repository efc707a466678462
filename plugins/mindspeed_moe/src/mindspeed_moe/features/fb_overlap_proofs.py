"""Proofs of forward and backward passes side by side: a model trains as without, to the bit."""

from __future__ import annotations

from mindspeed_moe.features.proofs import as_without

PAIRED = ("--moe-fb-overlap",)
FB_OVERLAP_PROOFS = (
    as_without("ep2", flags=PAIRED),
    as_without(
        "interleaved",
        *("--num-layers", "4", "--pipeline-model-parallel-size", "2"),
        *("--num-layers-per-virtual-pipeline-stage", "1"),
        ranks=4,
        flags=PAIRED,
    ),
)

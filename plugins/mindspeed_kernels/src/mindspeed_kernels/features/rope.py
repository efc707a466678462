"""The declaration of the fused rotary embedding."""

from __future__ import annotations

from mindspeed_core.feature import Flag, Gain, Patch, Requirement
from mindspeed_kernels.features.proofs import (
    GQA,
    LLAMA,
    RECOMPUTE,
    SWITCHED,
    KernelFeature,
    across,
    scenarios,
)

_ROPE = (*LLAMA, "--position-embedding-type", "rope")


class FusedRotaryEmbedding(KernelFeature):
    """Rotation of queries and keys in one operator; cosine and sine once for all layers."""

    name = "fused-rope"
    summary = "Run rotary embedding as one operator; compute cosine and sine once"
    flags = (Flag("--use-fused-rotary-pos-emb", help="Fused rotary embedding of queries and keys."),)
    requires = (
        Requirement(
            flag="--position-embedding-type",
            one_of=("rope", "mrope", "yarn"),
            reason="only these embeddings rotate queries and keys",
        ),
    )
    slots = ("rotary",)
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    patches = (
        Patch(
            target="megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
            new="mindspeed_kernels.modules.rope:with_fused_rotation",
            kind="wrap",
            reason="attention calls this function by name; there is no module to replace",
            versions="megatron-core>=0.15,<0.20",
        ),
    )
    docs = "mindspeed_kernels:docs/fused-rope.md"
    # Cosine and sine are kept once for all layers.
    formulas = {"activation_bytes": "0"}
    tuning = {"--use-fused-rotary-pos-emb": SWITCHED}
    verify = (
        *scenarios("--use-fused-rotary-pos-emb", (*_ROPE, *GQA), gain=(Gain("peak_bytes", 1.0),)),
        *across(
            ("--use-fused-rotary-pos-emb",),
            (),
            (
                ("interleaved", ("--rotary-interleaved",), 1),
                ("part-of-the-dimensions", ("--rotary-percent", "0.5"), 1),
                ("recompute", RECOMPUTE, 1),
            ),
            model=_ROPE,
        ),
    )

"""The declaration of the fused rotary embedding."""

from __future__ import annotations

from mindspeed_core.feature import Feature, Flag, Gain, Patch, Requirement, Scenario
from mindspeed_kernels.features.proofs import GQA, LLAMA, RECOMPUTE, scenarios

_ROPE = (*LLAMA, "--position-embedding-type", "rope")


class FusedRotaryEmbedding(Feature):
    """Rotation of queries and keys in one operator; cosine and sine once for all layers."""

    name = "fused-rope"
    family = "kernels"
    summary = "Rotary embedding in one operator that keeps no input; cosine and sine once for all layers"
    level = 1
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
            versions="megatron-core>=0.15,<0.17",
        ),
    )
    docs = "mindspeed_kernels:docs/fused-rope.md"
    deterministic = True
    affects_checkpoint = False
    fake_tensors = True
    verify = (
        *scenarios("--use-fused-rotary-pos-emb", (*_ROPE, *GQA), gain=(Gain("peak_bytes", 1.0),)),
        Scenario(
            "interleaved",
            flags=(*_ROPE, "--rotary-interleaved", "--use-fused-rotary-pos-emb"),
            baseline=(*_ROPE, "--rotary-interleaved"),
        ),
        Scenario(
            "part-of-the-dimensions",
            flags=(*_ROPE, "--rotary-percent", "0.5", "--use-fused-rotary-pos-emb"),
            baseline=(*_ROPE, "--rotary-percent", "0.5"),
        ),
        Scenario(
            "recompute",
            flags=(*_ROPE, *RECOMPUTE, "--use-fused-rotary-pos-emb"),
            baseline=(*_ROPE, *RECOMPUTE),
        ),
    )

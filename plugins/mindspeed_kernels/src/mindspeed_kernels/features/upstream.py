"""The declaration of the fused operators that MindSpeed switches on by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Flag
from mindspeed_kernels.features.proofs import LLAMA, KernelFeature, scenarios


class UpstreamFusions(KernelFeature):
    """Switches on what MindSpeed computes fused without a flag, where the model has it."""

    name = "upstream-fusions"
    summary = "Switch on the fused operators that MindSpeed uses by default"
    flags = (
        Flag(
            "--fusions",
            type=str,
            choices=("upstream",),
            help="upstream: the fused operators that MindSpeed uses without being asked.",
        ),
    )
    docs = "mindspeed_kernels:docs/upstream-fusions.md"
    verify = scenarios("--fusions=upstream", LLAMA, baseline=("--no-bias-swiglu-fusion",), tolerance=2e-5)

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Return the switches whose part the model has and that nothing else forbids."""
        if getattr(args, "fusions", None) != "upstream":
            return {}
        wanted = {
            "use_fused_swiglu": getattr(args, "swiglu", False),
            "use_fused_masked_softmax": _has_plain_attention(args),
            "affinity_cross_entropy": not getattr(args, "cross_entropy_loss_fusion", False),
            "use_gradient_accumulation_fusion": _has_main_gradients(args),
        }
        return {name: True for name, wants in wanted.items() if wants}

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say what still has a flag of its own."""
        return (
            "fused attention, norms and rotary embeddings have flags of their own in MindSpeed too: "
            "--use-flash-attn, --use-fused-rmsnorm, --use-fused-rotary-pos-emb",
        )


def _has_plain_attention(args: Any) -> bool:
    """Return whether a softmax of scores is computed at all, and may be fused."""
    other = ("use_flash_attn", "use_fusion_attn_v2", "use_triangle_attn", "multi_latent_attention")
    return (
        not any(getattr(args, name, False) for name in (*other, "no_masked_softmax_fusion"))
        and getattr(args, "masked_softmax_fusion", True)
        and getattr(args, "context_parallel_size", 1) == 1
        and getattr(args, "position_embedding_type", "") != "alibi"
    )


def _has_main_gradients(args: Any) -> bool:
    """Return whether there is a main gradient to add to, and it may be added to in place."""
    sharded = ("use_torch_fsdp2", "use_megatron_fsdp")
    return getattr(args, "gradient_accumulation_fusion", True) and not any(
        getattr(args, name, False) for name in (*sharded, "no_gradient_accumulation_fusion")
    )

"""The declarations of attention without a score matrix."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Gain, Scenario, hookimpl
from mindspeed_kernels.features.proofs import GQA, LONG, RECOMPUTE, scenarios


class FlashAttention(Feature):
    """Attention without a score matrix."""

    name = "flash-attn"
    family = "kernels"
    summary = "Attention without score matrix and mask tensor: causal, full or windowed, grouped queries"
    level = 1
    flags = (Flag("--use-flash-attn", help="Flash attention as the core of every attention."),)
    conflicts = (
        Conflict(
            flag="--create-attention-mask-in-dataloader",
            reason="flash attention makes its own causal mask and takes none",
        ),
        Conflict(
            flag="--reset-attention-mask",
            reason="flash attention makes a causal mask over the whole sequence, not per document",
        ),
    )
    slots = ("core-attention",)
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_kernels:docs/flash-attn.md"
    places_modules = True
    affects_checkpoint = False
    fake_tensors = True
    formulas = {"activation_bytes": "2*s*b*h + 4*s*b*n", "flop": "4*b*n*s*s*d"}
    verify = (
        *scenarios("--use-flash-attn", (*LONG, *GQA), gain=(Gain("peak_bytes", 0.7),), tolerance=2e-5),
        Scenario(
            "recompute",
            flags=(*LONG, *RECOMPUTE, "--use-flash-attn"),
            baseline=(*LONG, *RECOMPUTE),
            tolerance=2e-5,
        ),
    )

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """No mask from the data loader where that is the host's default."""
        asked = getattr(args, "use_flash_attn", False)
        masked = getattr(args, "create_attention_mask_in_dataloader", False)
        return {"create_attention_mask_in_dataloader": False} if asked and masked else {}

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse what attends across ranks."""
        size = getattr(args, "context_parallel_size", 1)
        if size and size > 1:
            return (
                f"--use-flash-attn attends within one rank, but --context-parallel-size is {size}; use a "
                "context-parallel attention feature instead",
            )
        return ()

    @hookimpl(wrapper=True)
    def build_transformer_config(self) -> Generator[None, Any, Any]:
        """Selective recompute of attention would only cost time."""
        config = yield
        from mindspeed_kernels.modules.core_attention import without_attention_recompute

        return without_attention_recompute(config)

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any) -> Generator[None, Any, Any]:
        """Replace every core attention."""
        spec = yield
        from mindspeed_kernels.modules.core_attention import place_attention

        return place_attention(session, spec)

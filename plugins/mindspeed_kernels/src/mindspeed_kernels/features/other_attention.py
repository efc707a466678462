"""Declarations of features that replace plain attention where flash attention is not wanted."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Flag, Gain, Scenario, hookimpl
from mindspeed_kernels.features.proofs import (
    GQA,
    LONG,
    ON_RANK,
    SWITCHED,
    KernelFeature,
    across,
    resumed,
    scenarios,
)

_HOST_MASK = ("--use-flash-attn", "--attention-mask-on-cpu")


class TriangleAttention(KernelFeature):
    """Causal attention that never computes the scores above the diagonal."""

    name = "triangle-attn"
    summary = "Compute causal attention by blocks of queries: half the FLOPs and memory"
    level = 2
    flags = (
        Flag("--triangle-attn", help="Compute causal attention block by block of queries."),
        Flag("--triangle-block-size", type=int, default=512, help="Queries per block."),
    )
    conflicts = (
        Conflict(
            flag="--create-attention-mask-in-dataloader",
            reason="triangle attention is causal and takes no mask tensor",
        ),
        Conflict(
            flag="--reset-attention-mask",
            reason="triangle attention is causal over the whole sequence, not per document",
        ),
    )
    slots = ("core-attention",)
    docs = "mindspeed_kernels:docs/triangle-attn.md"
    places_modules = True
    formulas = {
        # Scaled queries, and weights of the blocks up to the diagonal.
        "activation_bytes": f"{ON_RANK} * element_size * num_attention_heads "
        "* (kv_channels + (seq_length + triangle_block_size) / 2)"
    }
    tuning = {"--triangle-attn": SWITCHED, "--triangle-block-size": (256, 512, 1024)}
    verify = scenarios(
        "--triangle-attn",
        (*LONG, *GQA, "--triangle-block-size", "64"),
        gain=(Gain("peak_bytes", 0.9),),
        tolerance=2e-5,
    )

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse blocks without queries, and what attends across ranks or windows."""
        problems = []
        if args.triangle_block_size < 1:
            problems.append(f"--triangle-block-size {args.triangle_block_size}: a block has at least 1 query")
        size = getattr(args, "context_parallel_size", 1)
        if size and size > 1:
            problems.append(
                f"--triangle-attn attends within one rank, but --context-parallel-size is {size}; install "
                "mindspeed-cp, whose attention takes over"
            )
        if getattr(args, "window_size", None) is not None:
            problems.append("--triangle-attn and --window-size both say what queries see; drop one of them")
        return problems

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Replace every core attention."""
        spec = yield
        from mindspeed_kernels.modules.triangle_attention import place_triangle_attention

        return place_triangle_attention(session, spec, args.triangle_block_size)


class MaskedSoftmaxFeature(KernelFeature):
    """The softmax of plain attention in one operator that keeps its result only."""

    name = "masked-softmax"
    summary = "Run scale, mask and softmax of attention as one operator, without Apex"
    flags = (Flag("--use-fused-masked-softmax", help="Fused scale, mask and softmax in plain attention."),)
    conflicts = (
        Conflict(feature="flash-attn", reason="flash attention has no softmax to replace; drop one of them"),
        Conflict(
            feature="triangle-attn", reason="triangle attention has its own softmax; drop one of the two"
        ),
        Conflict(
            flag="--no-masked-softmax-fusion",
            reason="the one asks for what the other turns off; drop one of the two",
        ),
    )
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_kernels:docs/masked-softmax.md"
    places_modules = True
    formulas = {"activation_bytes": f"{ON_RANK} * element_size * num_attention_heads * seq_length"}
    tuning = {"--use-fused-masked-softmax": SWITCHED}
    verify = (
        *scenarios("--use-fused-masked-softmax", LONG, tolerance=2e-5),
        Scenario(
            "mask-tensor",
            flags=(*LONG, "--create-attention-mask-in-dataloader", "--use-fused-masked-softmax"),
            baseline=(*LONG, "--create-attention-mask-in-dataloader"),
            tolerance=2e-5,
        ),
    )

    @hookimpl(wrapper=True)
    def build_model(self, session: Any) -> Generator[None, Any, Any]:
        """Replace the softmax of every attention."""
        chunks = yield
        from mindspeed_kernels.modules.masked_softmax import place_masked_softmax

        place_masked_softmax(session, chunks, self.name)
        return chunks


class GenerateMask(KernelFeature):
    """Keep the mask of all attention on the host, for features that ask for it as a tensor."""

    name = "generate-mask"
    summary = "Share one attention mask between layers, kept in host memory"
    level = 2
    flags = (
        Flag(
            "--attention-mask-on-cpu",
            help="Keep the whole attention mask on the host instead of the small one on the device.",
        ),
    )
    slots = ("attention-mask",)
    docs = "mindspeed_kernels:docs/generate-mask.md"
    verify = (
        *across(_HOST_MASK, ("--use-flash-attn",), model=LONG, tolerance=0.0),
        resumed(_HOST_MASK, LONG),
    )

    @hookimpl(wrapper=True)
    def build_model(self, session: Any) -> Generator[None, Any, Any]:
        """Let the store of masks know, until the session closes."""
        chunks = yield
        from mindspeed_kernels.attention.mask_store import STORE

        session.ledger.setting(
            "mindspeed_kernels.attention.mask_store:STORE",
            lambda: setattr(STORE, "on_host", True),
            STORE.reset,
            owner=self.name,
            reason="--attention-mask-on-cpu",
        )
        return chunks

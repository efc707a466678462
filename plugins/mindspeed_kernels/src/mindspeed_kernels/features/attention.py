"""Declarations of flash attention, its variants and linear biases."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Flag, Gain, Requirement, Scenario, hookimpl
from mindspeed_kernels.features.proofs import (
    GQA,
    LAYOUTS,
    LONG,
    ON_RANK,
    RECOMPUTE,
    SWITCHED,
    KernelFeature,
    across,
    resumed,
    scenarios,
)

_UNLIMITED = 2147483647
_ALIBI = ("--position-embedding-type", "alibi")
_ALIBI_TENSOR = (*_ALIBI, "--alibi-fusion-attn-type", "0")
_SQUARE, _FILL, _OPPOSITE = "--square-alibi-mask", "--fill-neg-inf", "--alibi-diagonal-opposite"
_BY_DEFINITION = ("--ops-backend", "npu_fusion_attention=reference")


class FlashAttention(KernelFeature):
    """Attention without a score matrix."""

    name = "flash-attn"
    summary = "Compute attention without materializing scores or masks"
    flags = (
        Flag("--use-flash-attn", help="Flash attention as the core of every attention."),
        Flag(
            "--pre-tockens",
            type=int,
            default=65536,
            changes_training=True,
            help="How many tokens before its own a query sees, in sparse modes 0, 4, 7 and 8.",
        ),
        Flag(
            "--next-tockens",
            type=int,
            default=0,
            changes_training=True,
            help="How many tokens behind its own a query sees; below 0 it does not see the nearest either.",
        ),
        Flag(
            "--sparse-mode",
            type=int,
            default=0,
            choices=tuple(range(9)),
            help="What queries see: 0 to 3 causal, 4 a band, 7 and 8 a band in one packed sequence.",
        ),
        Flag(
            "--shape-order",
            type=str,
            default="SBH",
            choices=("SBH", "BSH", "BSND"),
            help="Accepted; tensors stay in the order SBH, which costs no copies.",
        ),
    )
    conflicts = (
        Conflict(
            feature="triangle-attn",
            reason="triangle attention and flash attention should not be used together: both are the core "
            "attention; drop --triangle-attn or --use-flash-attn",
        ),
    )
    slots = ("core-attention",)
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_kernels:docs/flash-attn.md"
    places_modules = True
    formulas = {
        # The context, and one number per row and head; on NPUs two rows of eight.
        "activation_bytes": f"{ON_RANK} * num_attention_heads * (element_size * kv_channels + 4)",
        "activation_bytes.npu": f"{ON_RANK} * num_attention_heads * (element_size * kv_channels + 64)",
        # Two products forward, of which a causal mask leaves half.
        "flop": f"{ON_RANK} * 2 * seq_length * num_attention_heads * kv_channels",
    }
    tuning = {"--use-flash-attn": SWITCHED}
    verify = (
        *scenarios("--use-flash-attn", (*LONG, *GQA), gain=(Gain("peak_bytes", 0.7),), tolerance=2e-5),
        *across(
            ("--use-flash-attn",),
            (),
            (
                ("recompute", RECOMPUTE, 1),
                ("documents", ("--create-attention-mask-in-dataloader", "--reset-attention-mask"), 1),
            ),
            model=LONG,
            tolerance=2e-5,
        ),
        Scenario(
            "band-and-window",
            flags=(*LONG, "--use-flash-attn", "--sparse-mode", "4", "--pre-tockens", "40"),
            baseline=(*LONG, "--window-size", "40,0"),
            tolerance=2e-5,
        ),
    )

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return the order of dimensions, which no kernel needs to know."""
        return {"--shape-order": "tensors stay in the order SBH, which costs no copies"}

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Drop the data loader's mask where it is the host's default and documents are not kept apart."""
        asked = getattr(args, "use_flash_attn", False) and not getattr(args, "reset_attention_mask", False)
        masked = getattr(args, "create_attention_mask_in_dataloader", False)
        return {"create_attention_mask_in_dataloader": False} if asked and masked else {}

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse what attends across ranks, and modes that lack what they need."""
        problems = []
        size = getattr(args, "context_parallel_size", 1)
        if size and size > 1:
            problems.append(
                f"--use-flash-attn attends within one rank, but --context-parallel-size is {size}; install "
                "mindspeed-cp, whose attention takes over"
            )
        mode = args.sparse_mode
        if mode in (5, 6):
            problems.append(
                f"--sparse-mode {mode} needs the length of every sample's prefix, which no part of this "
                "training provides; use 2, or call the operator npu_fusion_attention with prefix yourself"
            )
        if mode in (4, 7, 8):
            problems += _band_problems(args)
        if mode not in (0, 2, 3) and getattr(args, "window_size", None) is not None:
            problems.append(
                f"--sparse-mode {mode} and --window-size both say what queries see; drop one of them"
            )
        return problems

    @classmethod
    def model_facts(cls, args: Any) -> Mapping[str, Any]:
        """Return the band that queries see, where it is not the model's own."""
        return _band(args)

    @hookimpl(wrapper=True)
    def build_transformer_config(self) -> Generator[None, Any, Any]:
        """Drop selective recompute of attention, which would only cost time."""
        config = yield
        from mindspeed_kernels.modules.core_attention import without_attention_recompute

        return without_attention_recompute(config)

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Replace every core attention."""
        spec = yield
        from mindspeed_kernels.modules.core_attention import options_from_flags, place_attention

        return place_attention(session, spec, options_from_flags(args, session.plan.names))


def _band(args: Any) -> Mapping[str, Any]:
    """Return what a band of visible tokens is in the terms of the model: megatron-core's window."""
    if getattr(args, "sparse_mode", None) not in (4, 7, 8):
        return {}
    return {"window_size": [args.pre_tockens, args.next_tockens]}


def _band_problems(args: Any) -> list[str]:
    mode, before, behind = args.sparse_mode, args.pre_tockens, args.next_tockens
    problems = []
    if before >= _UNLIMITED:
        problems.append(
            f"--sparse-mode {mode} is a band, but --pre-tockens {before} is no limit; give a number of tokens"
        )
    if behind > 0:
        problems.append(
            f"--next-tockens {behind} lets a query of a causal model see tokens behind its own; use 0 or "
            f"less with --sparse-mode {mode}"
        )
    if before + behind < 0:
        problems.append(
            f"--pre-tockens {before} and --next-tockens {behind} leave a query of --sparse-mode {mode} "
            f"nothing to see; --pre-tockens must be at least {-behind}"
        )
    return problems


class FusionAttentionV2(KernelFeature):
    """The second version of the fused attention kernel of Ascend devices."""

    name = "fusion-attn-v2"
    summary = "Use version 2 of the NPU's fused attention kernel"
    flags = (
        Flag(
            "--use-fusion-attn-v2", help="Prefer the second version of the attention kernel; rarely needed."
        ),
    )
    requires = (
        Requirement(feature="flash-attn", implies=True, reason="it is another kernel of flash attention"),
    )
    docs = "mindspeed_kernels:docs/fusion-attn-v2.md"
    verify = (
        *across(("--use-fusion-attn-v2",), ("--use-flash-attn",), model=LONG),
        resumed(("--use-fusion-attn-v2",), LONG),
    )


class Alibi(KernelFeature):
    """Positions as a bias of attention by distance (Press et al., 2022)."""

    name = "alibi"
    summary = "Add linear biases to attention scores in place of position embeddings"
    level = 2
    flags = (
        Flag("--position-embedding-type", type=str, choices=("alibi",), help="Attention with linear biases."),
        Flag(
            "--alibi-fusion-attn-type",
            type=int,
            default=2,
            choices=(0, 2, 3),
            help="0: a tensor of biases; 2: slopes; 3: slopes times the root of the distance.",
        ),
        Flag(_SQUARE, help="Accepted; biases are always relative to the query's position."),
        Flag(_FILL, help="Accepted; what is not visible is always hidden."),
        Flag(
            _OPPOSITE,
            help="Accepted; under a causal mask the sign of the distance makes no difference.",
        ),
    )
    requires = (
        Requirement(feature="flash-attn", implies=True, reason="the bias is computed inside of attention"),
    )
    conflicts = (
        Conflict(
            flag="--use-rotary-position-embeddings",
            reason="positions are a bias of attention already; drop one of the two",
        ),
        Conflict(
            flag="--multi-latent-attention",
            reason="multi-latent attention carries rotary positions in its keys; drop one of the two",
        ),
    )
    slots = ("position-embedding",)
    docs = "mindspeed_kernels:docs/alibi.md"
    affects_checkpoint = True
    verify = (
        *across(_ALIBI, (*_ALIBI_TENSOR, *_BY_DEFINITION), model=(*LONG, *GQA), tolerance=2e-5),
        resumed(_ALIBI, (*LONG, *GQA), tolerance=2e-5),
    )

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether positions are a bias that the kernel computes."""
        asked = getattr(args, "position_embedding_type", None) == "alibi"
        return asked and args.alibi_fusion_attn_type in (2, 3)

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return what is so without being asked for."""
        return {
            _SQUARE: "biases are always relative to the query's position",
            _FILL: "what is not visible is always hidden",
            _OPPOSITE: "under a causal mask the sign of the distance makes no difference",
        }

    @classmethod
    def model_facts(cls, args: Any) -> Mapping[str, Any]:
        """Return of what the biases are multiples."""
        return {"alibi": "root of the distance" if args.alibi_fusion_attn_type == 3 else "distance"}

    @hookimpl(wrapper=True)
    def validate_arguments_early(self) -> Generator[None, Any, Any]:
        """Build the model itself without position embeddings."""
        args = yield
        changed = copy.copy(args)
        changed.position_embedding_type = "none"
        return changed


class AlibiTensor(Alibi):
    """The same positions, handed to the kernel as a tensor of biases."""

    name = "alibi-tensor"
    summary = "Give the attention kernel ALiBi as a tensor (--alibi-fusion-attn-type 0)"
    checkpoint_as = "alibi"
    verify = (
        *across(_ALIBI_TENSOR, (*_ALIBI, *_BY_DEFINITION), LAYOUTS[:2], model=(*LONG, *GQA), tolerance=2e-5),
        resumed(_ALIBI_TENSOR, (*LONG, *GQA), tolerance=2e-5),
    )

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether positions are a bias tensor."""
        asked = getattr(args, "position_embedding_type", None) == "alibi"
        return asked and args.alibi_fusion_attn_type == 0

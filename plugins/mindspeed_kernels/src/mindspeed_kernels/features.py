"""Declarations of the fused operators: flags, requirements, proofs. No torch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Gain, Requirement, Scenario, hookimpl

# Adam divides by the root of the second moment: with its usual epsilon the sign of a gradient that is zero
# but for rounding decides about a whole step.
_STEADY = ("--adam-eps", "1e-3")
_LLAMA = (*_STEADY, "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear")
_GQA = ("--group-query-attention", "--num-query-groups", "2")
_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_PP2 = ("--pipeline-model-parallel-size", "2")
_LONG = (*_STEADY, "--seq-length", "256", "--max-position-embeddings", "256")
_RECOMPUTE = (
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
)


def _scenarios(
    flag: str,
    model: tuple[str, ...],
    baseline: tuple[str, ...] = (),
    gain: tuple[Gain, ...] = (),
    tolerance: float = 1e-5,
) -> tuple[Scenario, ...]:
    """One process, tensor and sequence parallel, pipeline parallel, distributed optimizer, and bfloat16."""
    layouts = (
        ("single", (), 1),
        ("tp2-sp", _TP2, 2),
        ("pp2", _PP2, 2),
        ("dp2-distributed-optimizer", ("--use-distributed-optimizer",), 2),
    )
    exact = tuple(
        Scenario(
            name,
            flags=(*model, *layout, flag),
            baseline=(*model, *layout, *baseline),
            world_size=world_size,
            tolerance=tolerance,
            gains=gain if world_size == 1 else (),
        )
        for name, layout, world_size in layouts
    )
    # bfloat16 has 8 bits: where one side rounds once and the other several times, they differ by percents.
    rounded = Scenario(
        "bf16",
        flags=(*model, "--bf16", flag),
        baseline=(*model, "--bf16", *baseline),
        tolerance=0.1,
        gains=tuple(Gain(item.measure, 1.0) for item in gain),
    )
    return (*exact, rounded)


class FusedRMSNormFeature(Feature):
    """RMSNorm that keeps its input and one number per row."""

    name = "fused-rmsnorm"
    family = "kernels"
    summary = "RMSNorm in one operator, also under sequence parallelism; keeps only its input for backward"
    level = 1
    flags = (Flag("--use-fused-rmsnorm", help="Fused RMSNorm at every norm of the model."),)
    requires = (
        Requirement(flag="--normalization", equals="RMSNorm", reason="the operator computes RMSNorm only"),
    )
    slots = ("norm",)
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_kernels:docs/fused-rmsnorm.md"
    places_modules = True
    deterministic = True
    affects_checkpoint = False
    fake_tensors = True
    verify = (
        *_scenarios("--use-fused-rmsnorm", (*_LLAMA, "--qk-layernorm"), gain=(Gain("peak_bytes", 0.98),)),
        Scenario(
            "zero-centred",
            flags=(*_LLAMA, "--apply-layernorm-1p", "--use-fused-rmsnorm"),
            baseline=(*_LLAMA, "--apply-layernorm-1p"),
        ),
        Scenario(
            "recompute",
            flags=(*_LLAMA, *_RECOMPUTE, "--use-fused-rmsnorm"),
            baseline=(*_LLAMA, *_RECOMPUTE),
        ),
    )

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any) -> Generator[None, Any, Any]:
        """Replace every norm."""
        spec = yield
        from mindspeed_kernels.modules.norm import place_rms_norm

        return place_rms_norm(session, spec)


class FusedSwiGLUFeature(Feature):
    """SwiGLU that keeps its input only."""

    name = "fused-swiglu"
    family = "kernels"
    summary = "SwiGLU in one operator that keeps only its input for backward"
    level = 1
    flags = (Flag("--use-fused-swiglu", help="Fused SwiGLU in every MLP."),)
    requires = (Requirement(flag="--swiglu", reason="the fused operator computes SwiGLU only"),)
    slots = ("activation",)
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_kernels:docs/fused-swiglu.md"
    places_modules = True
    deterministic = True
    affects_checkpoint = False
    fake_tensors = True
    verify = (
        *_scenarios(
            "--use-fused-swiglu",
            _LLAMA,
            baseline=("--no-bias-swiglu-fusion",),
            gain=(Gain("peak_bytes", 0.98),),
        ),
        Scenario(
            "against-megatron-fusion",
            flags=(*_LLAMA, "--use-fused-swiglu"),
            baseline=_LLAMA,
            gains=(Gain("peak_bytes", 1.02),),
        ),
        Scenario(
            "with-bias",
            flags=(*_STEADY, "--swiglu", "--use-fused-swiglu"),
            baseline=(*_STEADY, "--swiglu", "--no-bias-swiglu-fusion"),
        ),
    )

    @hookimpl(wrapper=True)
    def build_transformer_config(self) -> Generator[None, Any, Any]:
        """Let the MLP build its activation from the specification."""
        config = yield
        from mindspeed_kernels.modules.activation import use_activation_modules

        return use_activation_modules(config)

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any) -> Generator[None, Any, Any]:
        """Fill the activation of every MLP."""
        spec = yield
        from mindspeed_kernels.modules.activation import place_swiglu

        return place_swiglu(session, spec)


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
        *_scenarios("--use-flash-attn", (*_LONG, *_GQA), gain=(Gain("peak_bytes", 0.7),), tolerance=2e-5),
        Scenario(
            "recompute",
            flags=(*_LONG, *_RECOMPUTE, "--use-flash-attn"),
            baseline=(*_LONG, *_RECOMPUTE),
            tolerance=2e-5,
        ),
    )

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


DECLARATIONS = (FusedRMSNormFeature, FusedSwiGLUFeature, FlashAttention)

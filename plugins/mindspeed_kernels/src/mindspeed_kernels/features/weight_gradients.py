"""Declarations of weight gradients that are added up in place, and of grouped experts."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Flag, Gain, Patch, Requirement, Scenario, hookimpl
from mindspeed_kernels.features.proofs import (
    LAYOUTS,
    LLAMA,
    PP2,
    RECOMPUTE,
    SHARDED,
    STEADY,
    SWITCHED,
    KernelFeature,
    across,
    resumed,
    scenarios,
)

_VERSIONS = "megatron-core>=0.15,<0.20"
_UTIL = "megatron.core.transformer.moe.grouped_gemm_util"
_LAYERS = "megatron.core.tensor_parallel.layers"
_MOE = (
    *STEADY,
    *("--swiglu", "--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2"),
    *("--moe-token-dispatcher-type", "alltoall"),
)
_GROUPED = ("--moe-grouped-gemm",)
_FUSED = (*_GROUPED, "--gemm-gradient-accumulation-fusion")
_EP2 = ("--expert-model-parallel-size", "2")


class GradientAccumulationFusion(KernelFeature):
    """Linear layers add their weight gradient to the main gradient in place, in float32."""

    name = "matmul-add"
    summary = "Accumulate weight gradients of linear layers in place, without Apex"
    flags = (
        Flag(
            "--use-gradient-accumulation-fusion",
            help="Add weight gradients of linear layers to the float32 main gradient in place.",
        ),
    )
    conflicts = (
        Conflict(flag="--use-torch-fsdp2", reason="fully sharded parameters have no main gradient to add to"),
        Conflict(
            flag="--no-gradient-accumulation-fusion",
            reason="the one asks for what the other turns off; drop one of the two",
        ),
    )
    patches = (
        Patch(
            target=f"{_LAYERS}:fused_weight_gradient_mlp_cuda",
            new="mindspeed_kernels.modules.weight_gradients:LinearWeightGradients",
            kind="add",
            reason="linear layers call this optional extension by its name, which is missing without Apex",
            versions=_VERSIONS,
        ),
        Patch(
            target=f"{_LAYERS}:_grad_accum_fusion_available",
            new=True,
            reason="linear layers refuse the option while this says that the extension is missing",
            versions=_VERSIONS,
        ),
    )
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_kernels:docs/matmul-add.md"
    tuning = {"--use-gradient-accumulation-fusion": SWITCHED}
    verify = (
        *scenarios("--use-gradient-accumulation-fusion", LLAMA, gain=(Gain("peak_bytes", 1.0),)),
        Scenario(
            "overlapped",
            flags=(
                *LLAMA,
                *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
                "--use-gradient-accumulation-fusion",
            ),
            baseline=(*LLAMA, "--use-distributed-optimizer"),
            world_size=2,
        ),
        *across(("--use-gradient-accumulation-fusion",), (), (("recompute", RECOMPUTE, 1),), model=LLAMA),
    )

    @hookimpl(wrapper=True)
    def build_transformer_config(self) -> Generator[None, Any, Any]:
        """Set the option that linear layers read."""
        config = yield
        config.gradient_accumulation_fusion = True
        return config


class GroupedExperts(KernelFeature):
    """All experts of a layer in one grouped product."""

    name = "grouped-experts"
    summary = "Run a layer's experts as one grouped GEMM, without TransformerEngine"
    flags = (Flag("--moe-grouped-gemm", help="Compute the experts of a layer in one grouped product."),)
    requires = (
        Requirement(flag="--num-experts", reason="there is nothing to group without experts"),
        Requirement(flag="--disable-bias-linear", reason="grouped products of experts have no bias"),
    )
    conflicts = (
        Conflict(flag="--use-torch-fsdp2", reason="views of a fully sharded parameter cannot be multiplied"),
    )
    slots = ("experts",)
    patches = (
        Patch(
            target=f"{_UTIL}:grouped_gemm",
            new="mindspeed_kernels.modules.grouped_experts:GroupedExperts",
            reason="the constructor of megatron-core's grouped experts refuses while this name is None",
            versions="megatron-core>=0.15,<0.17",
            # Newer versions have no such class.
            required=False,
        ),
    )
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_kernels:docs/grouped-experts.md"
    tuning = {"--moe-grouped-gemm": SWITCHED}
    places_modules = True
    verify = (
        *across(_GROUPED, (), (LAYOUTS[0], ("ep2", _EP2, 2), LAYOUTS[1]), model=_MOE),
        resumed(_GROUPED, _MOE, saved=(*SHARDED, *_EP2), other=SHARDED),
    )

    @classmethod
    def idle(cls, args: Any) -> str:
        """Return that experts have to stand apart where Megatron-FSDP shards them."""
        if getattr(args, "use_megatron_fsdp", False):
            return "--use-megatron-fsdp shards the weights of each expert, which run one after the other"
        return ""

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any) -> Generator[None, Any, Any]:
        """Replace the experts of every layer."""
        spec = yield
        from mindspeed_kernels.modules.grouped_experts import place_grouped_experts

        return place_grouped_experts(session, spec)


class GroupedGradientAccumulation(KernelFeature):
    """Grouped experts add their weight gradients to the main gradients in place."""

    name = "gmm-add"
    summary = "Accumulate weight gradients of grouped experts in place, in float32"
    flags = (
        Flag(
            "--gemm-gradient-accumulation-fusion",
            help="Add weight gradients of grouped experts to the float32 main gradient in place.",
        ),
    )
    requires = (
        Requirement(feature="grouped-experts", reason="it is only supported with --moe-grouped-gemm"),
    )
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_kernels:docs/gmm-add.md"
    tuning = {"--gemm-gradient-accumulation-fusion": SWITCHED}
    places_modules = True
    verify = (
        *across(_FUSED, _GROUPED, LAYOUTS[:1], model=_MOE, gains=(Gain("peak_bytes", 1.0),)),
        *across(_FUSED, _GROUPED, (("ep2", _EP2, 2),), model=_MOE),
        Scenario(
            "dp2-distributed-optimizer",
            flags=(*_MOE, *("--use-distributed-optimizer", "--overlap-grad-reduce"), *_FUSED),
            baseline=(*_MOE, "--use-distributed-optimizer", "--moe-grouped-gemm"),
            world_size=2,
        ),
        resumed(_FUSED, _MOE, saved=_EP2, other=PP2),
    )

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse fully sharded parameters, which have no main gradient to add to."""
        if getattr(args, "use_torch_fsdp2", False):
            return ("--gemm-gradient-accumulation-fusion needs main gradients; drop --use-torch-fsdp2",)
        return ()

    @hookimpl(wrapper=True)
    def build_model(self, session: Any) -> Generator[None, Any, Any]:
        """Let grouped experts add to the main gradients that data parallelism gives them later."""
        model = yield
        from mindspeed_kernels.modules.grouped_experts import accumulate_in_place

        accumulate_in_place(session, model)
        return model

"""The declaration of the fused activation."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Flag, Gain, Requirement, Scenario, hookimpl
from mindspeed_kernels.features.proofs import LLAMA, ON_RANK, STEADY, SWITCHED, KernelFeature, scenarios


class FusedSwiGLUFeature(KernelFeature):
    """SwiGLU that keeps its input only."""

    name = "fused-swiglu"
    summary = "Run SwiGLU as one operator that saves only its input"
    flags = (Flag("--use-fused-swiglu", help="Fused SwiGLU in every MLP."),)
    requires = (Requirement(flag="--swiglu", reason="the fused operator computes SwiGLU only"),)
    slots = ("activation",)
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_kernels:docs/fused-swiglu.md"
    places_modules = True
    formulas = {"activation_bytes": f"{ON_RANK} * 2 * ffn_hidden_size * element_size"}
    tuning = {"--use-fused-swiglu": SWITCHED}
    verify = (
        *scenarios(
            "--use-fused-swiglu",
            LLAMA,
            baseline=("--no-bias-swiglu-fusion",),
            gain=(Gain("peak_bytes", 0.98),),
        ),
        Scenario(
            "against-megatron-fusion",
            flags=(*LLAMA, "--use-fused-swiglu"),
            baseline=LLAMA,
            gains=(Gain("peak_bytes", 1.02),),
        ),
        Scenario(
            "with-bias",
            flags=(*STEADY, "--swiglu", "--use-fused-swiglu"),
            baseline=(*STEADY, "--swiglu", "--no-bias-swiglu-fusion"),
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
        """Set the activation of every MLP."""
        spec = yield
        from mindspeed_kernels.modules.activation import place_swiglu

        return place_swiglu(session, spec)

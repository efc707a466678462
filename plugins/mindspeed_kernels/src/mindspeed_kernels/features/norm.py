"""The declaration of the fused norm."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Flag, Gain, Requirement, hookimpl
from mindspeed_kernels.features.proofs import (
    LLAMA,
    PARTS,
    RECOMPUTE,
    SWITCHED,
    KernelFeature,
    across,
    scenarios,
)


class FusedRMSNormFeature(KernelFeature):
    """RMSNorm that keeps its input and one number per row."""

    name = "fused-rmsnorm"
    summary = "Run RMSNorm as one operator that saves only its input"
    flags = (Flag("--use-fused-rmsnorm", help="Fused RMSNorm at every norm of the model."),)
    requires = (
        Requirement(flag="--normalization", equals="RMSNorm", reason="the operator computes RMSNorm only"),
    )
    slots = ("norm",)
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_kernels:docs/fused-rmsnorm.md"
    places_modules = True
    formulas = {
        # Two norms keep their input and one number per token.
        "activation_bytes": "2 * (element_size * hidden_size + 4) * seq_length * micro_batch_size "
        f"/ (context_parallel_size * {PARTS})"
    }
    tuning = {"--use-fused-rmsnorm": SWITCHED}
    verify = (
        *scenarios(
            "--use-fused-rmsnorm",
            (*LLAMA, "--qk-layernorm"),
            # Torch's own norm keeps as little on CUDA.
            gain=(Gain("peak_bytes", 0.98, platforms=("cpu", "npu")), Gain("peak_bytes", 1.0)),
        ),
        *across(
            ("--use-fused-rmsnorm",),
            (),
            (("zero-centred", ("--apply-layernorm-1p",), 1), ("recompute", RECOMPUTE, 1)),
            model=LLAMA,
        ),
    )

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any) -> Generator[None, Any, Any]:
        """Replace every norm."""
        spec = yield
        from mindspeed_kernels.modules.norm import place_rms_norm

        return place_rms_norm(session, spec)

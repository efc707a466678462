"""Declarations about numerics: deterministic runs, and the cross entropy for NPUs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Flag, Patch, hookimpl
from mindspeed_kernels.features.proofs import LAYOUTS, LLAMA, PP2, STEADY, TP2, KernelFeature, across, resumed

_FUSED = (
    *("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn"),
    *("--position-embedding-type", "rope", "--use-fused-rotary-pos-emb"),
    *("--use-gradient-accumulation-fusion", "--affinity-cross-entropy"),
)


class Deterministic(KernelFeature):
    """Two runs give the same bits."""

    name = "deterministic"
    summary = "Make two runs give the same bits"
    level = 0
    flags = (
        Flag(
            "--npu-deterministic",
            aliases=("--deterministic-ops",),
            help="Use only algorithms that give the same bits on every run.",
        ),
    )
    docs = "mindspeed_kernels:docs/deterministic.md"
    verify = (
        *across(
            (*_FUSED, "--npu-deterministic"),
            _FUSED,
            (*LAYOUTS, ("tp2-pp2", (*TP2, *PP2), 4)),
            model=LLAMA,
            steps=10,
            tolerance=0.0,
        ),
        resumed((*_FUSED, "--npu-deterministic"), LLAMA, tolerance=2e-5),
    )

    @hookimpl(wrapper=True)
    def prepare_process(self, session: Any) -> Generator[None, Any, Any]:
        """Set what libraries read at their start, and what torch and the operators choose from."""
        done = yield
        from mindspeed_kernels.modules.determinism import only_repeatable, set_environment

        set_environment(session)
        only_repeatable(session, self.name)
        return done

    @hookimpl(wrapper=True)
    def build_transformer_config(self) -> Generator[None, Any, Any]:
        """Set megatron-core's own deterministic mode."""
        config = yield
        config.deterministic_mode = True
        return config


class AffinityCrossEntropy(KernelFeature):
    """The logit of the target by selection instead of assignment by index."""

    name = "affinity-cross-entropy"
    summary = "Compute vocabulary-parallel cross entropy without indexed writes, slow on NPUs"
    flags = (Flag("--affinity-cross-entropy", help="Cross entropy without assignments by index (for NPUs)."),)
    slots = ("lm-loss",)
    patches = (
        Patch(
            target="megatron.core.tensor_parallel.cross_entropy:"
            "VocabParallelCrossEntropy.calculate_predicted_logits",
            new="mindspeed_kernels.modules.cross_entropy:calculate_predicted_logits",
            reason="a static method inside the loss of the model; no specification reaches it",
            versions="megatron-core>=0.15.3,<0.20",
        ),
    )
    docs = "mindspeed_kernels:docs/affinity-cross-entropy.md"
    verify = (
        *across(("--affinity-cross-entropy",), (), model=STEADY, tolerance=1e-6),
        resumed(("--affinity-cross-entropy",), STEADY, saved=PP2, other=TP2),
    )

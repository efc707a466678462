"""The declaration of the fused update of Adam."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Conflict, Flag, Gain, Patch, Requirement, hookimpl
from mindspeed_kernels.features.proofs import (
    LLAMA,
    OVERLAPPED,
    SHARDED,
    SWITCHED,
    KernelFeature,
    across,
    scenarios,
)

_CLIPPING = "megatron.core.optimizer.clip_grads"
_VERSIONS = "megatron-core>=0.15,<0.20"
_ELSEWHERE = "the update is made elsewhere then; drop one of the two"


class FusedAdam(KernelFeature):
    """AdamW in one launch, and the scaling of gradients in one."""

    name = "fused-adam"
    summary = "Update all parameters with one AdamW launch, and scale gradients in one"
    flags = (Flag("--use-fused-adam", help="Torch's fused AdamW, and gradients scaled in one launch."),)
    requires = (Requirement(flag="--optimizer", equals="adam", reason="the fused update is Adam's"),)
    conflicts = (
        Conflict(flag="--optimizer-cpu-offload", reason=_ELSEWHERE),
        Conflict(flag="--use-precision-aware-optimizer", reason=_ELSEWHERE),
        Conflict(feature="block-optimizer", reason=_ELSEWHERE),
    )
    slots = ("optimizer",)
    modes = ("train",)
    patches = (
        Patch(
            target=f"{_CLIPPING}:multi_tensor_scale_impl",
            new="mindspeed_kernels.modules.fused_adam:with_one_launch",
            kind="wrap",
            reason="a function that megatron-core chooses when it is imported; nobody hands it in",
            versions=_VERSIONS,
        ),
    )
    docs = "mindspeed_kernels:docs/fused-adam.md"
    tuning = {"--use-fused-adam": SWITCHED}
    verify = (
        *scenarios("--use-fused-adam", (*LLAMA, "--clip-grad", "0.5"), gain=(Gain("step_peak_bytes", 1.0),)),
        *across(
            ("--use-fused-adam",),
            (),
            (
                ("dp2-overlapped", OVERLAPPED, 2),
                ("bf16-sharded", (*SHARDED, "--bf16"), 2),
                ("no-clipping", ("--clip-grad", "0"), 1),
            ),
            model=LLAMA,
            tolerance=1e-2,
        ),
    )

    @hookimpl(wrapper=True)
    def build_optimizer(self, session: Any) -> Generator[None, Any, Any]:
        """Change what was built."""
        optimizer = yield
        from mindspeed_kernels.modules.fused_adam import fuse_updates

        fuse_updates(session, optimizer, self.name)
        return optimizer

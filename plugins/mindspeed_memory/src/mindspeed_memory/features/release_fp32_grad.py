"""The declaration of 16-bit gradients that are made float32 as they are used."""

from __future__ import annotations

from typing import Any

from mindspeed_core.feature import Feature, Flag, Proofs
from mindspeed_memory.features.block_optimizer import IN_BLOCKS
from mindspeed_memory.optim.options import RELEASE

_FLAG = "--release-fp32-grad"


class ReleaseFp32Grad(Feature):
    """No float32 copy of gradients."""

    name = RELEASE
    family = "memory"
    summary = "Convert gradients to float32 window by window instead of all at once"
    flags = (Flag(_FLAG, help="Convert 16-bit gradients to float32 window by window in the update."),)
    requires = (IN_BLOCKS,)
    slots = ("optimizer-grad",)
    docs = "mindspeed_memory:docs/release-fp32-grad.md"
    modes = ("train",)
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {
        "optimizer_bytes_per_parameter": "12 / (data_parallel_size if use_distributed_optimizer else 1)",
    }
    tuning = {_FLAG: (False, True)}
    verify = Proofs("mindspeed_memory.features.optimizer_proofs:RELEASE_PROOFS")

    @classmethod
    def idle(cls, args: Any) -> str:
        """Return that there is no float32 copy, where gradients are float32 already."""
        if not (getattr(args, "bf16", False) or getattr(args, "fp16", False)):
            return "nothing to release: a float32 model has float32 gradients"
        if getattr(args, "accumulate_allreduce_grads_in_fp32", False):
            return (
                "nothing to release: --accumulate-allreduce-grads-in-fp32 reduces gradients in float32, and "
                "no copy is made of them"
            )
        if getattr(args, "bf16", False) and not getattr(args, "grad_reduce_in_bf16", True):
            return (
                "nothing to release: without --grad-reduce-in-bf16 gradients are reduced in float32, and no "
                "copy is made of them"
            )
        return ""

"""The declaration of main parameters that are kept as the weight and 16 further bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import Feature, Flag, Proofs, Requirement
from mindspeed_memory.features.block_optimizer import IN_BLOCKS
from mindspeed_memory.optim.options import LIST, REUSE, SIGN

_FLAG, _TIES, _ROUNDING = "--reuse-fp32-param", "--reuse-fp32-ties", "--reuse-fp32-rounding"


class ReuseFp32Param(Feature):
    """The upper half of a main parameter is the weight."""

    name = REUSE
    family = "memory"
    summary = "Store main parameters as the bfloat16 weight plus 16 bits: 2 bytes less each"
    flags = (
        Flag(_FLAG, help="Store main parameters as the bfloat16 weight and 16 more bits."),
        Flag(
            _TIES,
            type=str,
            default=LIST,
            choices=(LIST, SIGN),
            help="Record ties that were rounded up in a list, or in the sign of the second moment.",
        ),
        Flag(
            _ROUNDING,
            type=str,
            default="rne",
            choices=("rne", "half-up"),
            help="Round weights as a cast does, or ties away from zero, which changes weights.",
        ),
    )
    requires = (
        IN_BLOCKS,
        Requirement(flag="--bf16", reason="only a bfloat16 weight is the upper half of a float32 number"),
    )
    slots = ("optimizer-master",)
    docs = "mindspeed_memory:docs/reuse-fp32-param.md"
    modes = ("train",)
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {
        "optimizer_bytes_per_parameter": "10 / (data_parallel_size if use_distributed_optimizer else 1)",
    }
    tuning = {_FLAG: (False, True)}
    verify = Proofs("mindspeed_memory.features.optimizer_proofs:REUSE_PROOFS")

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse notes of ties where there are none."""
        if args.reuse_fp32_rounding == "half-up" and args.reuse_fp32_ties == SIGN:
            return (f"{_TIES} {SIGN} has nothing to note with {_ROUNDING} half-up; drop it",)
        return ()

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say that half-up changes numbers."""
        if args.reuse_fp32_rounding == "half-up":
            return (f"{_ROUNDING} half-up rounds one weight in 2^17 otherwise than training without {_FLAG}",)
        return ()

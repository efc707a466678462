"""The declaration of Adam's moments in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import Feature, Flag, Proofs
from mindspeed_memory.features.block_optimizer import IN_BLOCKS
from mindspeed_memory.optim.options import SIGN
from mindspeed_optim.quantized_formats import FORMATS, format_problems

NAME = "opt-quant-states"
_FLAG = "--quant-states"


class QuantStates(Feature):
    """Moments of 8 or 16 bits, as one more form of state of the block-wise AdamW."""

    name = NAME
    family = "optim"
    summary = "Store Adam's moments in 8 bits (2 bytes a parameter, not 8) or in bfloat16"
    stability = "prototype"
    flags = (
        Flag(
            _FLAG,
            type=str,
            choices=FORMATS,
            help="Store moments in 8 bits with a scale for every 128 (fp8), or in bfloat16.",
        ),
    )
    requires = (IN_BLOCKS,)
    slots = ("optimizer-state",)
    docs = "mindspeed_optim:docs/opt-quant-states.md"
    modes = ("train",)
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {
        "optimizer_bytes_per_parameter": "(8 if quant_states == 'bf16' else 6 + 2 / 128) / "
        "(data_parallel_size if use_distributed_optimizer else 1)",
    }
    verify = Proofs("mindspeed_optim.features.quant_proofs:QUANT_PROOFS")

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse formats that are not there, and a sign that 8 bits of a root do not keep."""
        found = list(format_problems(_FLAG, args.quant_states))
        if getattr(args, "reuse_fp32_param", False) and args.reuse_fp32_ties == SIGN:
            found.append(
                f"--reuse-fp32-ties {SIGN}: a second moment that {_FLAG} stores has no sign; use "
                "--reuse-fp32-ties list"
            )
        return found

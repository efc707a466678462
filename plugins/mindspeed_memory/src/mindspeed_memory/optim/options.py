"""The options of the block-wise AdamW, from the arguments of all active features; no torch."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

WHOLE, SPLIT = "whole", "split"
"""Forms of main parameters: float32 numbers; the weight and 16 further bits."""
LIST, SIGN = "list", "sign"
"""Where ties of a split are noted: in a list of indices; in the sign of the second moment."""

REUSE, RELEASE = "reuse-fp32-param", "release-fp32-grad"


@dataclass(frozen=True)
class BlockOptions:
    """What the block-wise AdamW keeps, in which form, and where.

    Attributes:
        master: `WHOLE` or `SPLIT`.
        rounding: of split main parameters, see `mindspeed_memory.optim.split_master`.
        ties: `LIST` or `SIGN`.
    """

    master: str = WHOLE
    rounding: str = "rne"
    ties: str = LIST


def block_options(args: Any, active: Container[str]) -> BlockOptions:
    """Return the options of the active features, by name."""
    if REUSE not in active:
        return BlockOptions()
    return BlockOptions(SPLIT, args.reuse_fp32_rounding, args.reuse_fp32_ties)

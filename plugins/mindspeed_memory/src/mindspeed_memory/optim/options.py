"""The options of the block-wise AdamW, from the arguments of all active features; no torch."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_core.discovery.extensions import installed_extensions
from mindspeed_memory.extension_points import OPTIMIZER_STATES

WHOLE, SPLIT = "whole", "split"
"""Forms of main parameters: float32 numbers; the weight and 16 further bits."""
LIST, SIGN = "list", "sign"
"""Places that note ties of a split: a list of indices; the sign of the second moment."""
ON_DEVICE, SWAPPED, VIRTUAL, COMPRESSED = "device", "swapped", "virtual", "compressed"
"""Places of what is kept: the device; the host; the host for moments, within a budget; moments compressed."""
ALL = "all"
ALL_GIB = 65.0
"""The budget that ``all`` stands for, in GiB."""

REUSE, RELEASE = "reuse-fp32-param", "release-fp32-grad"
SWAP, VIRTUAL_FEATURE, COMPRESS = "swap-optimizer", "virtual-optimizer", "compress-optimizer"
_PLACES = {SWAP: SWAPPED, VIRTUAL_FEATURE: VIRTUAL, COMPRESS: COMPRESSED}


@dataclass(frozen=True)
class BlockOptions:
    """Options of the block-wise AdamW: which state it stores, in which form, and where.

    Attributes:
        master: `WHOLE` or `SPLIT`.
        rounding: of split main parameters, see `mindspeed_memory.optim.split_master`.
        ties: `LIST` or `SIGN`.
        place: one of `ON_DEVICE`, `SWAPPED`, `VIRTUAL` and `COMPRESSED`, or a name that is contributed to
            `OPTIMIZER_STATES`.
        times: windows in which a step takes what is swapped; 0 for one that is copied back after the step.
        budget: bytes of the host for moments under `VIRTUAL`, of each pipeline stage.
    """

    master: str = WHOLE
    rounding: str = "rne"
    ties: str = LIST
    place: str = ON_DEVICE
    times: int = 16
    budget: tuple[int, ...] = ()


def block_options(args: Any, active: Container[str]) -> BlockOptions:
    """Return the options of the active features, by name."""
    places = {**_PLACES, **{name: name for name in installed_extensions(OPTIMIZER_STATES).names()}}
    place = next((place for name, place in places.items() if name in active), ON_DEVICE)
    options = BlockOptions(place=place)
    if REUSE in active:
        options = BlockOptions(SPLIT, args.reuse_fp32_rounding, args.reuse_fp32_ties, place)
    if place == SWAPPED:
        return BlockOptions(place=place, times=args.swap_optimizer_times)
    if place == VIRTUAL:
        budget = tuple(int(gib * 2**30) for gib in budgets(args.virtual_optimizer))
        return BlockOptions(options.master, options.rounding, options.ties, place, budget=budget)
    return options


def budgets(given: Sequence[str]) -> tuple[float, ...]:
    """Return the budgets that a flag gives, in GiB.

    Raises:
        ValueError: one of them is neither ``all`` nor a number.
    """
    return tuple(ALL_GIB if value == ALL else float(value) for value in given)

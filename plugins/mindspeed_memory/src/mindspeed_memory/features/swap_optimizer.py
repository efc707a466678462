"""The declaration of optimizer state that lives on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import Feature, Flag, Proofs
from mindspeed_memory.features.block_optimizer import IN_BLOCKS
from mindspeed_memory.optim.options import SWAP

_FLAG, _TIMES = "--swap-optimizer", "--swap-optimizer-times"


class SwapOptimizer(Feature):
    """Main parameters and moments pass over the device window by window."""

    name = SWAP
    family = "memory"
    summary = "Offload main parameters and moments to host memory between updates"
    flags = (
        Flag(_FLAG, help="Offload main parameters and moments to host memory between updates."),
        Flag(
            _TIMES,
            type=int,
            default=16,
            help="Windows of an update; 0: one window, offloaded while the next step begins.",
        ),
    )
    requires = (IN_BLOCKS,)
    slots = ("optimizer-master", "optimizer-state")
    docs = "mindspeed_memory:docs/swap-optimizer.md"
    modes = ("train",)
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {
        "optimizer_bytes_per_parameter": "0",
        "update_bytes_per_parameter": "(32 / swap_optimizer_times if swap_optimizer_times else 32) "
        "/ (data_parallel_size if use_distributed_optimizer else 1)",
    }
    tuning = {_FLAG: (False, True)}
    verify = Proofs("mindspeed_memory.features.optimizer_proofs:SWAP_PROOFS")

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse numbers of windows that there are not."""
        if args.swap_optimizer_times < 0:
            return (f"{_TIMES} {args.swap_optimizer_times} is no number of windows; use 0 or more",)
        return ()

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say where a step takes more than it saves."""
        if args.swap_optimizer_times in (0, 1, 2):
            return (
                f"{_TIMES} {args.swap_optimizer_times}: the windows of an update take as much of the device "
                "as the state did; memory is saved in forward and backward only",
            )
        return ()

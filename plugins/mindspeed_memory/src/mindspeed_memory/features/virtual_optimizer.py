"""The declaration of moments that live on the host as far as a budget goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import Feature, Flag, Proofs
from mindspeed_memory.features.block_optimizer import IN_BLOCKS
from mindspeed_memory.optim.options import ALL, VIRTUAL_FEATURE, budgets

_FLAG = "--virtual-optimizer"


class VirtualOptimizer(Feature):
    """Moments on the host, main parameters on the device."""

    name = VIRTUAL_FEATURE
    family = "memory"
    summary = "Offload Adam's moments to host memory up to a budget"
    stability = "prototype"
    flags = (
        Flag(
            _FLAG,
            type=str,
            nargs="+",
            metavar="GIB",
            help="Moments in host memory: all, GiB per rank, or one number per pipeline stage.",
        ),
    )
    requires = (IN_BLOCKS,)
    slots = ("optimizer-state",)
    docs = "mindspeed_memory:docs/virtual-optimizer.md"
    modes = ("train",)
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_memory.features.optimizer_proofs:VIRTUAL_PROOFS")

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse budgets that are none, and another number of them than there are pipeline stages."""
        given = " ".join(args.virtual_optimizer)
        try:
            found = budgets(args.virtual_optimizer)
        except ValueError:
            return (f"{_FLAG} {given}: a budget is {ALL} or a number of GiB",)
        if not all(0 < budget < float("inf") for budget in found):
            return (f"{_FLAG} {given}: a budget is more than 0 GiB, and finite",)
        stages = getattr(args, "pipeline_model_parallel_size", 1) or 1
        if len(found) not in (1, stages):
            return (
                f"{_FLAG} {given}: {len(found)} budgets for {stages} pipeline stages; give one for all, or "
                "one for each",
            )
        return ()

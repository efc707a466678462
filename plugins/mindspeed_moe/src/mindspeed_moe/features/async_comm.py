"""The declaration of collectives of a dispatcher that run at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Requirement
from mindspeed_moe.features.proofs import ASYNC_PROOFS

_FLAG = "--moe-permutation-async-comm"


class AsyncCommunication(Feature):
    """The collectives that take tokens to experts are launched together, those of their gradients too."""

    name = "moe-async-comm"
    family = "moe"
    summary = "Collectives of a token dispatcher launched together, forward and backward"
    flags = (Flag(_FLAG, help="Launch the collectives of a token dispatcher together."),)
    requires = (
        Requirement(feature="moe-core", reason="it places the layer that communicates", implies=True),
        Requirement(flag="--num-experts", reason="without experts no token travels"),
        Requirement(
            flag="--moe-token-dispatcher-type",
            one_of=("allgather", "alltoall"),
            reason="the flexible dispatcher communicates by kernels of its own",
        ),
    )
    conflicts = (
        Conflict(
            flag="--overlap-moe-expert-parallel-comm",
            reason="both order the communication of a layer; keep one of the two",
        ),
    )
    docs = "mindspeed_moe:docs/moe-async-comm.md"
    fake_tensors = True
    deterministic = True
    tuning = {_FLAG: (False, True)}
    affects_checkpoint = False
    verify = ASYNC_PROOFS

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse shared experts on a stream of their own, which follow megatron-core's dispatcher."""
        overlapped = getattr(args, "moe_alltoall_overlap_comm", False)
        if getattr(args, "moe_shared_expert_overlap", False) and not overlapped:
            return (
                f"{_FLAG} with --moe-shared-expert-overlap: the dispatcher calls no shared experts; add "
                "--moe-alltoall-overlap-comm, which overlaps them in both directions, or drop one of the two",
            )
        return ()

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that there is nothing to launch where experts are on one rank."""
        ranks = (getattr(args, "expert_model_parallel_size", 1) or 1) * (
            getattr(args, "tensor_model_parallel_size", 1) or 1
        )
        return (f"{_FLAG} changes nothing, all experts are on one rank",) if ranks == 1 else ()

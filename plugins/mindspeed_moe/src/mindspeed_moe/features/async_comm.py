"""The declaration of collectives of a dispatcher that run at the same time."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Feature, Flag, Proofs, Requirement, hookimpl
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER
from mindspeed_moe.features.shared_experts import shared_experts_on_a_stream

_FLAG = "--moe-permutation-async-comm"


class AsyncCommunication(Feature):
    """The collectives that take tokens to experts are launched together, those of their gradients too."""

    name = "moe-async-comm"
    family = "moe"
    summary = "Launch the collectives of a token dispatcher together"
    flags = (Flag(_FLAG, help="Launch the collectives of a token dispatcher together."),)
    requires = (
        PLACED_LAYER,
        Requirement(flag="--num-experts", reason="without experts no token travels"),
        Requirement(
            flag="--moe-token-dispatcher-type",
            one_of=("allgather", "alltoall", "alltoall_seq"),
            reason="the flexible dispatcher communicates by kernels of its own",
        ),
    )
    conflicts = (ORDERS_COMMUNICATION,)
    docs = "mindspeed_moe:docs/moe-async-comm.md"
    fake_tensors = True
    deterministic = True
    tuning = {_FLAG: (False, True)}
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.proofs:ASYNC_PROOFS")

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return what stands down."""
        if not shared_experts_on_a_stream(_FLAG, args):
            return ()
        return (
            "--moe-shared-expert-overlap changes nothing: the dispatcher calls no shared experts, which "
            "are computed after it; --moe-alltoall-overlap-comm overlaps them",
        )

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return that there is nothing to launch where experts are on one rank."""
        ranks = (getattr(args, "expert_model_parallel_size", 1) or 1) * (
            getattr(args, "tensor_model_parallel_size", 1) or 1
        )
        return {_FLAG: "all experts are on one rank"} if ranks == 1 else {}

    @hookimpl(wrapper=True)
    def validate_arguments_early(self) -> Generator[None, Any, Any]:
        """Let shared experts on a stream of their own stand down."""
        args = yield
        if shared_experts_on_a_stream(_FLAG, args):
            args = copy.copy(args)
            args.moe_shared_expert_overlap = False
        return args

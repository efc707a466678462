"""The declaration of a value of ``--moe-token-dispatcher-type`` that megatron-core had before."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Feature, Flag, Proofs, hookimpl

_FLAG, _DEST = "--moe-token-dispatcher-type", "moe_token_dispatcher_type"


class SequentialDispatcher(Feature):
    """The dispatcher ``alltoall_seq`` of older scripts is megatron-core's ``alltoall``."""

    name = "moe-alltoall-seq"
    family = "moe"
    summary = "Accept the dispatcher alltoall_seq of older scripts, as alltoall"
    level = 0
    flags = (
        Flag(
            _FLAG,
            type=str,
            choices=("alltoall_seq",),
            help="alltoall_seq: its former name for alltoall under tensor parallelism.",
        ),
    )
    docs = "mindspeed_moe:docs/moe-alltoall-seq.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.proofs:SEQUENTIAL_DISPATCHER_PROOFS")

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that the value is another one."""
        return (f"{_FLAG} alltoall_seq is alltoall, which replaced it in megatron-core",)

    @hookimpl(wrapper=True)
    def validate_arguments_early(self) -> Generator[None, Any, Any]:
        """Give hosts and megatron-core the value that they know."""
        args = copy.copy((yield))
        setattr(args, _DEST, "alltoall")
        return args

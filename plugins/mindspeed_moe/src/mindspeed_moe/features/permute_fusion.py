"""The declaration of permutations of tokens by one kernel each."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, dest_of, hookimpl
from mindspeed_moe.features.core import ORDERS_COMMUNICATION
from mindspeed_moe.features.shared_experts import shared_experts_on_a_stream

_FLAG, _MEGATRONS = "--use-fused-moe-token-permute-and-unpermute", "--moe-permute-fusion"


def _left_to_megatron_lm(args: Any) -> bool:
    """Return whether the layer runs in a way that only megatron-core's dispatchers know."""
    return (
        getattr(args, "moe_token_dispatcher_type", None) not in ("alltoall", "alltoall_seq")
        or getattr(args, "cuda_graph_impl", "none") not in (None, "none")
        or bool(getattr(args, "overlap_moe_expert_parallel_comm", False))
    )


class PermuteFusion(Feature):
    """Tokens are sorted by expert, and results brought back, by one kernel each."""

    name = "moe-permute-fusion"
    family = "moe"
    summary = "Permute and unpermute tokens with one kernel each"
    flags = (
        Flag(_FLAG, help="Permute and unpermute tokens with one kernel each."),
        Flag(_MEGATRONS, help=f"The same as {_FLAG}."),
    )
    requires = (
        Requirement(feature="moe-core", reason="it places the dispatcher that permutes", implies=True),
        Requirement(flag="--num-experts", reason="without experts no token is permuted"),
        Requirement(
            flag="--moe-token-dispatcher-type",
            one_of=("alltoall", "alltoall_seq"),
            reason="other dispatchers do not permute as many rows of each token",
        ),
    )
    conflicts = (
        Conflict(
            flag="--moe-router-padding-for-quantization",
            reason="the kernel needs as many experts of each token; drop one of the two",
        ),
        ORDERS_COMMUNICATION,
    )
    docs = "mindspeed_moe:docs/moe-permute-fusion.md"
    fake_tensors = True
    deterministic = True
    tuning = {_FLAG: (False, True)}
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.proofs:PERMUTE_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether it is asked for; Megatron-LM's spelling, where its own kernels do not serve it."""
        if getattr(args, dest_of(_FLAG), False):
            return True
        return bool(getattr(args, dest_of(_MEGATRONS), False)) and not _left_to_megatron_lm(args)

    @classmethod
    def idle(cls, args: Any) -> str:
        """Return why tokens are permuted without the kernel: some positions are none."""
        if getattr(args, "is_instruction_dataset", False):
            return (
                "rows of --is-instruction-dataset are filled up with positions that go to no expert, and the "
                "kernel needs as many experts of each token; the same numbers come without it"
            )
        return ""

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse tokens of unequal numbers of experts, and shared experts on a stream of their own."""
        found = list(shared_experts_on_a_stream(_FLAG, args))
        factor = getattr(args, "moe_expert_capacity_factor", None)
        if factor is not None and not getattr(args, "moe_pad_expert_input_to_capacity", False):
            found.append(
                f"{_FLAG} with --moe-expert-capacity-factor {factor:g} drops choices, and the kernel needs "
                "as many experts of each token; add --moe-pad-expert-input-to-capacity, or drop one of "
                "the two"
            )
        return found

    @hookimpl(wrapper=True)
    def validate_arguments_early(self) -> Generator[None, Any, Any]:
        """Keep the flag from megatron-core, which demands TransformerEngine for it."""
        args = copy.copy((yield))
        args.moe_permute_fusion = False
        return args

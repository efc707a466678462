"""The declaration of hot experts that are copied to all ranks for each micro-batch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, hookimpl
from mindspeed_moe.expert_ranks import expert_cuts, expert_ranks
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER
from mindspeed_moe.features.shared_experts import shared_experts_on_a_stream
from mindspeed_moe.options import HOT_GROUPS

_FLAG = "--balanced-moe-experts"
_NUMBER, _GROUPS = "--balanced-moe-hot-expert-num", "--trans-hot-expert-group-num"
_DEFAULT = 3
_MOST_GROUPS = 8


class BalancedExperts(Feature):
    """Rows of hot experts are computed where their tokens are, with copies of the experts."""

    name = "moe-balanced-experts"
    family = "moe"
    summary = "Replicate hot experts on all ranks for each micro-batch to balance load"
    flags = (
        Flag(_FLAG, help="Replicate hot experts on all ranks for each micro-batch."),
        Flag(_NUMBER, type=int, default=_DEFAULT, help="Most experts of a layer that are replicated."),
        Flag(_GROUPS, type=int, default=_DEFAULT, help="Communicators that broadcast replicas in parallel."),
    )
    requires = (
        PLACED_LAYER,
        Requirement(flag="--num-experts", reason="there are no experts to copy"),
        Requirement(
            feature="grouped-experts",
            reason="copies are computed in one grouped product; add --moe-grouped-gemm",
        ),
        Requirement(
            flag="--moe-token-dispatcher-type",
            one_of=("alltoall", "alltoall_seq"),
            reason="it is the rows of an all-to-all that are kept at home",
        ),
    )
    conflicts = (
        ORDERS_COMMUNICATION,
        Conflict(flag="--moe-expert-capacity-factor", reason="rows beyond it are dropped, not computed"),
        Conflict(
            flag="--moe-router-padding-for-quantization",
            reason="rows of copies are not padded; drop one of the two",
        ),
        Conflict(flag="--moe-apply-probs-on-input", reason="copies weigh their results; drop one of the two"),
        Conflict(
            flag="--gemm-gradient-accumulation-fusion",
            reason="gradients of copies arrive apart from those that it adds in place; drop one of the two",
        ),
        *(
            Conflict(feature=name, reason="it computes experts in a way of its own; drop one of the two")
            for name in ("moe-fb-overlap", "moe-pipe-experts", "moe-zero-memory", "moe-adaptive-recompute")
        ),
        Conflict(flag="--use-megatron-fsdp", reason="weights are not whole when they are copied"),
        Conflict(flag="--use-torch-fsdp2", reason="weights are not whole when they are copied"),
        Conflict(
            feature="moe-alltoall-overlap",
            reason="it orders products and weight gradients that copies do not have; drop one of the two",
        ),
        Conflict(
            feature="moe-permute-fusion",
            reason="the kernel needs as many experts of each token; drop one of the two",
        ),
    )
    slots = ("expert-map",)
    docs = "mindspeed_moe:docs/moe-balanced-experts.md"
    fake_tensors = True
    deterministic = True
    tuning = {_FLAG: (False, True)}
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.expert_map_proofs:BALANCED_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether experts are copied, or a number is given that means nothing without that."""
        return bool(getattr(args, "balanced_moe_experts", False)) or any(
            getattr(args, name, _DEFAULT) != _DEFAULT
            for name in ("balanced_moe_hot_expert_num", "trans_hot_expert_group_num")
        )

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse numbers out of range, and layouts without other ranks."""
        found = list(shared_experts_on_a_stream(_FLAG, args))
        number, groups = args.balanced_moe_hot_expert_num, args.trans_hot_expert_group_num
        if not args.balanced_moe_experts:
            given = f"{_NUMBER} {number}" if number != _DEFAULT else f"{_GROUPS} {groups}"
            found.append(f"{given} changes nothing without copies; add {_FLAG}, or drop it")
        ranks = expert_ranks(args)
        local = (getattr(args, "num_experts", None) or 0) // ranks
        if ranks < 2:
            found.append(
                f"{_FLAG} with --expert-model-parallel-size {ranks} has no other rank to copy to; use 2 or "
                "more, or drop it"
            )
        if not 1 <= number <= max(local, 1):
            found.append(
                f"{_NUMBER} {number} is no number of experts of a rank, which has {local}; use 1 to {local}"
            )
        most = min(max(number, 1), _MOST_GROUPS)
        if not 1 <= groups <= most:
            found.append(
                f"{_GROUPS} {groups} is no number of communicators for {number} copies; use 1 to {most}"
            )
        cut = expert_cuts(args)
        if cut > 1:
            found.append(
                f"{_FLAG} keeps rows at home, which experts cut over {cut} ranks must share; use "
                "--expert-tensor-parallel-size 1"
            )
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return what copies cost."""
        hidden = getattr(args, "hidden_size", None)
        width = getattr(args, "moe_ffn_hidden_size", None) or getattr(args, "ffn_hidden_size", None)
        if not hidden or not width:
            return ()
        weights = args.balanced_moe_hot_expert_num * hidden * width
        weights *= 3 if getattr(args, "swiglu", False) else 2
        size = 2 if getattr(args, "bf16", False) or getattr(args, "fp16", False) else 4
        return (
            f"{_FLAG}: a rank receives at most {weights * size / 2**20:.3g} MiB of weights for each layer "
            f"and micro-batch, keeps them for backward, and sends {weights * 4 / 2**20:.3g} MiB of gradients",
        )

    @hookimpl(wrapper=True)
    def build_process_groups(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Create the communicators of copies."""
        pg = yield
        whole = [list(range(pg.ep.size()))]
        for index in range(args.trans_hot_expert_group_num):
            name = f"{HOT_GROUPS}{index}"
            if name not in session.groups:
                session.groups.split(name, pg.ep, whole)
        return pg

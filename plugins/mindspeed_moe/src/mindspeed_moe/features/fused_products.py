"""The declaration of products of experts that exchange rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, dest_of
from mindspeed_moe.expert_ranks import expert_cuts, expert_ranks
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER
from mindspeed_moe.features.shared_experts import shared_experts_on_a_stream
from mindspeed_moe.options import has_places

_ROWS, _PLACES = "--moe-alltoall-mc2", "--moe-bmm-mc2"


class FusedProducts(Feature):
    """Products of experts take rows from their tokens' ranks, and bring results back there."""

    name = "moe-mc2"
    family = "moe"
    summary = "Fuse expert GEMMs with the communication beside them"
    flags = (
        Flag(_ROWS, help="Fuse all-to-all into the grouped GEMMs of experts."),
        Flag(_PLACES, help="Fuse all-to-all and all-gather of padded experts into batched GEMMs."),
    )
    requires = (
        PLACED_LAYER,
        Requirement(flag="--num-experts", reason="without experts no row travels"),
        Requirement(
            feature="grouped-experts",
            reason="products of all experts of a rank are one operator; add --moe-grouped-gemm",
        ),
        Requirement(
            flag="--moe-token-dispatcher-type",
            one_of=("alltoall", "alltoall_seq"),
            reason="it is the all-to-all that is part of a product",
        ),
    )
    conflicts = (
        ORDERS_COMMUNICATION,
        *(
            Conflict(feature=name, reason="the exchange is part of a product; drop one of the two")
            for name in (
                *("moe-comm-plan", "moe-zero-memory", "moe-adaptive-recompute", "moe-balanced-experts"),
                "moe-permute-fusion",
            )
        ),
        Conflict(
            flag="--moe-apply-probs-on-input",
            reason="probabilities multiply activations between both products; drop one of the two",
        ),
        Conflict(
            flag="--gemm-gradient-accumulation-fusion",
            reason="weight gradients are those of the operators; drop one of the two",
        ),
        Conflict(
            flag="--moe-router-padding-for-quantization",
            reason="rows are not padded; drop one of the two",
        ),
        Conflict(
            flag="--use-megatron-fsdp", reason="it frees weights between the products that are kept apart"
        ),
    )
    slots = ("layer-schedule",)
    docs = "mindspeed_moe:docs/moe-mc2.md"
    fake_tensors = True
    deterministic = True
    tuning = {_ROWS: (False, True)}
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.fused_products_proofs:FUSED_PRODUCTS_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether one of the flags is given."""
        return any(_given(args, flag.name) for flag in cls.flags)

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse both at once, layouts that the operators are not for, and capacities that do not suit."""
        if _given(args, _ROWS) and _given(args, _PLACES):
            return (f"{_ROWS} and {_PLACES} are two ways to exchange the same rows; keep one of the two",)
        flag = _ROWS if _given(args, _ROWS) else _PLACES
        found = list(shared_experts_on_a_stream(flag, args))
        if (ranks := expert_ranks(args)) < 2:
            found.append(
                f"{flag} with --expert-model-parallel-size {ranks} has no exchange to be part of a product; "
                "use 2 or more, or drop it"
            )
        if has_places(args):
            found.append(
                f"{flag} with --moe-model-type deepspeed_moe, whose places travel without probabilities; "
                "drop one of the two"
            )
        found += _of_rows(args) if flag == _ROWS else _of_places(args)
        modules = getattr(args, "recompute_modules", None) or ()
        if getattr(args, "recompute_granularity", None) == "selective" and "moe_act" in modules:
            found.append(
                f"{flag} with --recompute-modules moe_act: the activation stands between two operators that "
                "keep it; use moe instead, or drop one of the two"
            )
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return where exchange and product run one after the other."""
        if _given(args, _PLACES):
            return (
                f"{_PLACES}: no supported version of torch_npu has these kernels; exchange, gather and "
                "batched product run one after the other",
            )
        return (
            f"{_ROWS}: on NPUs kernels of one generation or another take 4 to 64 ranks and some sizes only; "
            "beyond those and on other devices exchange and product run one after the other",
        )


def _of_rows(args: Any) -> Sequence[str]:
    found = []
    if (cuts := expert_cuts(args)) > 1:
        found.append(
            f"{_ROWS} with experts cut over {cuts} ranks: rows travel to whole experts; add "
            "--expert-tensor-parallel-size 1"
        )
    if (factor := getattr(args, "moe_expert_capacity_factor", None)) is not None:
        found.append(
            f"{_ROWS} with --moe-expert-capacity-factor {factor}: as many rows travel as the router chose; "
            f"use {_PLACES} with --moe-pad-expert-input-to-capacity, or drop one of the two"
        )
    return found


def _of_places(args: Any) -> Sequence[str]:
    found = []
    padded = getattr(args, "moe_pad_expert_input_to_capacity", False)
    if getattr(args, "moe_expert_capacity_factor", None) is None or not padded:
        found.append(
            f"{_PLACES} multiplies equally many rows of each expert; add --moe-expert-capacity-factor and "
            f"--moe-pad-expert-input-to-capacity, or use {_ROWS}"
        )
    if expert_cuts(args) < 2:
        found.append(
            f"{_PLACES} gathers rows of experts that are cut, and these are whole; use "
            "--tensor-model-parallel-size 2 or more with --sequence-parallel, without "
            f"--expert-tensor-parallel-size 1, or {_ROWS}"
        )
    return found


def _given(args: Any, flag: str) -> bool:
    return bool(getattr(args, dest_of(flag), False))

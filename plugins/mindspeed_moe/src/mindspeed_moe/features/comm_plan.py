"""The declaration of plans of communication: how often a row travels, and over which network."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, hookimpl
from mindspeed_moe.comm_plans import AUTO, DEDUP, FLAG, FLAT, GATHER, NODE_SIZE, hops_of
from mindspeed_moe.expert_ranks import expert_cuts, expert_ranks
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER
from mindspeed_moe.features.shared_experts import shared_experts_on_a_stream
from mindspeed_moe.plan_choice import asked_plan, chosen_hops, chosen_plan, exchanged, node_size

_HIERARCHICAL, _ZERC = "--moe-hierarchical-alltoallv", "--moe-zerc"


class CommunicationPlan(Feature):
    """Rows travel once to each node or rank that has experts of them, instead of once for each expert."""

    name = "moe-comm-plan"
    family = "moe"
    summary = "Send each token once per node or rank instead of once per expert"
    flags = (
        Flag(
            FLAG,
            type=str,
            default=FLAT,
            choices=(FLAT, GATHER, DEDUP, AUTO),
            choices_from="moe.comm_plans",
            help=(
                "Send tokens once per expert (flat), gathered between nodes (gather), once per node "
                "and rank (dedup), or with the fewest bytes between nodes (auto)."
            ),
        ),
        Flag(NODE_SIZE, type=int, help="Expert-parallel ranks per node; by default the launcher's."),
        Flag(_HIERARCHICAL, help=f"The same as {FLAG} {AUTO}."),
        Flag(_ZERC, help=f"The same as {FLAG} {DEDUP} {NODE_SIZE} 1."),
    )
    requires = (
        PLACED_LAYER,
        Requirement(flag="--num-experts", reason="without experts no token travels"),
        Requirement(
            flag="--moe-token-dispatcher-type",
            one_of=("alltoall", "alltoall_seq"),
            reason="a plan stands in the place of the all-to-all",
        ),
    )
    conflicts = (
        ORDERS_COMMUNICATION,
        Conflict(
            feature="moe-permute-fusion",
            reason="rows that travel once are not sorted by expert before; drop one of the two",
        ),
        Conflict(
            flag="--moe-pad-expert-input-to-capacity",
            reason="rows that fill up an expert belong to no token; drop one of the two",
        ),
        Conflict(
            flag="--moe-router-padding-for-quantization",
            reason="tokens that fill up an expert are other ones than the router chose; drop one of the two",
        ),
        Conflict(
            feature="moe-fb-overlap",
            reason="passes take turns at one exchange in each direction, not at several; drop one of the two",
        ),
        Conflict(
            feature="moe-adaptive-recompute",
            reason="rows that travel once are not those that a rank computes; drop one of the two",
        ),
        Conflict(
            feature="moe-pipe-experts",
            reason="experts of a pipeline exchange their rows by themselves; drop one of the two",
        ),
    )
    docs = "mindspeed_moe:docs/moe-comm-plan.md"
    fake_tensors = True
    deterministic = True
    tuning = {FLAG: (FLAT, DEDUP)}
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.comm_plan_proofs:COMM_PLAN_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether a plan is asked for, or a size of nodes, which needs one."""
        return asked_plan(args) != FLAT or getattr(args, "moe_node_size", None) is not None

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse flags that disagree, and layouts that a plan cannot be laid over."""
        found = [*_contradictions(args), *shared_experts_on_a_stream(_asked(args), args)]
        ranks, cuts, given = expert_ranks(args), expert_cuts(args), getattr(args, "moe_node_size", None)
        if cuts > 1:
            found.append(
                f"{_asked(args)} with experts cut over {cuts} ranks: rows travel to whole experts; add "
                "--expert-tensor-parallel-size 1 or --moe-tp-extend-ep"
            )
        if ranks < 2:
            found.append(
                f"{_asked(args)} with --expert-model-parallel-size {ranks} has no communication to plan; use "
                "2 or more, or drop it"
            )
        elif given is not None and (given < 1 or ranks % given):
            found.append(
                f"{NODE_SIZE} {given} does not divide the {ranks} ranks of --expert-model-parallel-size; use "
                "a divisor"
            )
        elif ranks % node_size(args):
            found.append(
                f"{_asked(args)}: nodes of {node_size(args)} processes do not divide the {ranks} ranks of "
                f"--expert-model-parallel-size; add {NODE_SIZE} with a divisor"
            )
        elif not found:
            found += _unreached(args)
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return the plan that is followed and the bytes that it is expected to send between nodes."""
        name, ranks, size = chosen_plan(args), expert_ranks(args), node_size(args)
        sizes, nodes = exchanged(args), ranks // size
        said = f"communication of experts follows the plan {name}"
        if nodes == 1:
            return (f"{said} on one node of {ranks} ranks; {NODE_SIZE} says otherwise",)
        plans = dict.fromkeys((name, FLAT, GATHER, DEDUP))
        counted = [
            f"{plan} {sizes.expected_bytes(hops_of(plan, ranks, size), nodes):,.0f}"
            for plan in plans
            if plan in (FLAT, GATHER, DEDUP)
        ]
        return (
            f"{said} on {nodes} nodes of {size} ranks; bytes that a rank is expected to send to other nodes, "
            f"per layer, micro-batch and direction: {', '.join(counted)}",
        )

    @hookimpl(wrapper=True)
    def build_process_groups(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Create the groups of every hop."""
        pg = yield
        from mindspeed_moe.plan_groups import create_groups

        create_groups(session, chosen_hops(args), pg)
        return pg


def _asked(args: Any) -> str:
    """Return the flag that asks for a plan, as it was given."""
    if getattr(args, "moe_zerc", False):
        return _ZERC
    if getattr(args, "moe_hierarchical_alltoallv", False):
        return _HIERARCHICAL
    return f"{FLAG} {asked_plan(args)}"


def _contradictions(args: Any) -> Sequence[str]:
    """Return the flags that ask for different plans."""
    zerc, hierarchical = args.moe_zerc, args.moe_hierarchical_alltoallv
    plan, size = args.moe_comm_plan or FLAT, args.moe_node_size
    found = []
    if zerc and hierarchical:
        found.append(f"{_ZERC} and {_HIERARCHICAL} ask for different plans; keep one of the two")
    if zerc and plan not in (FLAT, DEDUP):
        found.append(f"{_ZERC} and {FLAG} {plan} ask for different plans; keep one of the two")
    if zerc and size not in (None, 1):
        found.append(f"{_ZERC} sends rows to ranks, and {NODE_SIZE} {size} to nodes; drop one of the two")
    if hierarchical and plan not in (FLAT, AUTO):
        found.append(f"{_HIERARCHICAL} is {FLAG} {AUTO}, not {plan}; keep one of the two")
    if plan == FLAT and not zerc and not hierarchical:
        found.append(f"{NODE_SIZE} {size} needs a plan; add {FLAG} {DEDUP} or {AUTO}, or drop it")
    if plan == GATHER and getattr(args, "variable_seq_lengths", False):
        found.append(
            f"{FLAG} {GATHER} with --variable-seq-lengths: ranks would gather different numbers of tokens; "
            f"use {DEDUP}"
        )
    return found


def _unreached(args: Any) -> Sequence[str]:
    """Return why the plan of another package cannot be followed."""
    try:
        chosen_hops(args)
    except ArgumentError as error:
        return (str(error),)
    return ()

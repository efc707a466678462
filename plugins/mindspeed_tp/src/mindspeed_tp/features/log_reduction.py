"""The declaration of losses that are summed beside the update."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Gain, hookimpl
from mindspeed_tp.features.proofs import (
    BOTH_OVERLAPS,
    INTERLEAVED,
    PP2,
    SP,
    TP2,
    as_on_one,
    as_without,
    resumed,
)

_LOG = ("--async-log-allreduce",)
_EXPERTS = (
    *("--num-experts", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "0.001"),
)
_PREDICTIONS = ("--mtp-num-layers", "2", "--untie-embeddings-and-output-weights")
LOG_PROOFS = (
    as_without("dp2", _LOG, gains=(Gain("collective_calls", 1.0),)),
    as_without("tp2", _LOG, *TP2, *SP),
    as_without("dp2-pp2", _LOG, *PP2, ranks=4, gains=(Gain("collective_calls", 1.0),)),
    as_without("interleaved", _LOG, *INTERLEAVED),
    as_without("experts", _LOG, *TP2, *SP, *_EXPERTS, gains=(Gain("collective_calls", 1.0),)),
    as_without("experts-dp2-pp2", _LOG, *PP2, *_EXPERTS, ranks=4, gains=(Gain("collective_calls", 1.0),)),
    as_without("predictions", _LOG, *TP2, *SP, *_PREDICTIONS),
    as_on_one("one-process", _LOG, *BOTH_OVERLAPS, both=("--calculate-per-token-loss",)),
    resumed(_LOG, *BOTH_OVERLAPS),
)


_FLAG = "--async-log-allreduce"


class AsynchronousLog(Feature):
    """Reported losses are summed over ranks while gradients are reduced and the optimizer updates."""

    name = "async-log-allreduce"
    family = "tp"
    summary = "Overlap the reduction of logged losses with the update"
    flags = (Flag(_FLAG, help="Reduce logged losses over ranks while the optimizer updates."),)
    conflicts = (
        Conflict(
            flag="--check-for-spiky-loss",
            reason="it looks at the loss before the update; drop one of the two",
        ),
        Conflict(
            flag="--bad-step-action",
            equals="skip",
            reason="it looks at the loss before the update; drop one of the two",
        ),
    )
    hosts = ("standalone",)
    docs = "mindspeed_tp:docs/async-log-allreduce.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    tuning = {_FLAG: (False, True)}
    verify = LOG_PROOFS

    @hookimpl(wrapper=True)
    def build_process_groups(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Create the groups of ranks that report together."""
        groups = yield
        from mindspeed_tp.log_reduction import create_groups

        layers = bool(args.num_experts or args.mtp_num_layers)
        create_groups(session, args.world_size, args.tensor_model_parallel_size, layers=layers)
        return groups

    @hookimpl
    def reduce_losses(
        self, session: Any, run: Any, reports: Sequence[Mapping[str, Any]], training: bool
    ) -> Any:
        """Start the sum in training; an evaluation has nothing beside it."""
        if not training:
            return session.default("reduce_losses", run=run, reports=reports, training=training)
        from mindspeed_tp.log_reduction import start_reduction

        return start_reduction(run, reports)

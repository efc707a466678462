"""The declaration of losses that are summed beside the update."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, hookimpl
from mindspeed_tp.features.log_proofs import LOG_PROOFS

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

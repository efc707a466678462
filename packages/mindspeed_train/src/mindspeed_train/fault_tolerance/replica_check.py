"""Comparison of the weights of data-parallel replicas: ``--check-weight-hash-across-dp-replicas-interval``.

Replicas start alike and are updated alike; where their weights differ, hardware or a collective has failed,
and every further step is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.utils import check_param_hashes_across_dp_replicas

from mindspeed_core.errors import UserError

if TYPE_CHECKING:
    from mindspeed_core.run import Run

_FLAG = "--check-weight-hash-across-dp-replicas-interval"


class ReplicaError(UserError):
    """Weights of data-parallel replicas that differ."""


def check_replicas(run: Run) -> None:
    """Compare the weights of all replicas by their hashes, before the first step and at the interval.

    Collective.

    Raises:
        ReplicaError: on every rank, where the weights of two replicas differ.
    """
    interval = run.args.check_weight_hash_across_dp_replicas_interval
    if interval is None or run.iteration % interval or run.session.platform.dry_run:
        return
    run.complete_parameters()
    if not check_param_hashes_across_dp_replicas(run.model, cross_check=True):
        raise ReplicaError(
            f"{_FLAG}: after step {run.iteration} the weights of data-parallel replicas differ; a device or "
            "a collective has failed. Go on from the last checkpoint, without the node that differs"
        )

"""Losses of a step that are summed over ranks while gradients are reduced and the optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_megatron.layer_losses import own_layer_losses
from mindspeed_megatron.loss_reduction import losses_of, own_table, remember_others
from mindspeed_megatron.losses import Losses

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session

GROUP, ALL = "log", "log.all"
"""Names of groups: the ranks of one place in tensor parallelism, which see all data and all stages; and all
ranks, which have shares of the losses of layers."""


def create_groups(session: Session, ranks: int, tensor_ranks: int, *, layers: bool) -> None:
    """Create the groups. Collective over all ranks.

    Args:
        session: owns them.
        ranks: of the world.
        tensor_ranks: tensor-parallel size, whose ranks are neighbours.
        layers: layers have losses of their own.
    """
    lists = [list(range(place, ranks, tensor_ranks)) for place in range(tensor_ranks)]
    session.groups.create(GROUP, lists)
    if layers:
        session.groups.create(ALL, [list(range(ranks))])


def start_reduction(run: Run, reports: Sequence[Mapping[str, torch.Tensor]]) -> Losses:
    """Start to sum what micro-batches reported, in one collective; whoever reads a loss waits for it.

    Losses of layers are summed over all ranks, in a second one.

    Args:
        run: the run.
        reports: see the stage ``reduce_losses``.
    """
    names, table = own_table(run, reports, training=True)
    read = _started(table, run.session.groups[GROUP])
    remember_others(run, lambda: read()[-1])
    losses = losses_of(names, read)
    own = own_layer_losses(run)
    if own is None:
        return losses
    return losses | own.read_by(_started(own.shares, run.session.groups[ALL]))


def _started(values: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    """Start to sum values over a group; return what waits and gives the numbers."""
    work = dist.all_reduce(values, group=group, async_op=True) if group.size() > 1 else None
    found: list[Any] = []

    def read() -> Any:
        if not found:
            if work is not None:
                work.wait()
            found.append(values.tolist())
        return found[0]

    return read

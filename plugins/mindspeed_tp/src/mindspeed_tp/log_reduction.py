"""Losses of a step that are summed over ranks while gradients are reduced and the optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mindspeed_core.megatron.loss_reduction import losses_of, own_table, remember_others
from mindspeed_core.runtime.losses import Losses

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session

GROUP = "log"
"""Name of the groups: the ranks of one place in tensor parallelism, which see all data and all stages."""


def create_groups(session: Session, ranks: int, tensor_ranks: int) -> None:
    """Create the groups. Collective over all ranks.

    Args:
        session: owns them.
        ranks: of the world.
        tensor_ranks: tensor-parallel size, whose ranks are neighbours.
    """
    lists = [list(range(place, ranks, tensor_ranks)) for place in range(tensor_ranks)]
    session.groups.create(GROUP, lists)


def start_reduction(run: Run, reports: Sequence[Mapping[str, torch.Tensor]]) -> Losses:
    """Start to sum what micro-batches reported, in one collective; whoever reads a loss waits for it.

    Args:
        run: the run.
        reports: see the stage ``reduce_losses``.
    """
    names, table = own_table(run, reports, training=True)
    group = run.session.groups[GROUP]
    work = dist.all_reduce(table, group=group, async_op=True) if group.size() > 1 else None
    read = _waiting(work, table)
    remember_others(run, lambda: read()[-1])
    return losses_of(names, read)


def _waiting(work: dist.Work | None, table: torch.Tensor) -> Callable[[], list[list[float]]]:
    found: list[list[list[float]]] = []

    def read() -> list[list[float]]:
        if not found:
            if work is not None:
                work.wait()
            found.append(table.tolist())
        return found[0]

    return read

"""The comparison of schedules over the ranks of a pipeline, before any of them waits for a message.

Every rank makes its schedule for itself. Where a file, a profile or a version of a package differs between
machines, they would wait for messages that nobody sends, or read one tensor as another. They compare through
the store of the process group: it answers also where a rank has ended, or has other channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mindspeed_core.errors import UserError
from mindspeed_pp.mail import StuckError
from mindspeed_pp.schedule import Schedule


def compare(schedule: Schedule, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
    """Refuse schedules that differ from rank to rank. Waits for all ranks of the pipeline.

    Args:
        schedule: of this rank.
        rank: this pipeline rank.
        ranks: of the pipeline, in the world.
        timeout: for the ranks to come here.

    Raises:
        UserError: another rank has made another schedule of the same arguments.
        StuckError: another rank does not come here.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    place = f"mindspeed/pp/schedules/{'-'.join(map(str, ranks))}"
    # The store outlives a session, and keeps what an earlier one said.
    number = store.add(f"{place}/count/{ranks[rank]}", 1)
    keys = [f"{place}/{number}/{other}" for other in ranks]
    own = f"{schedule.name} {schedule.digest}"
    store.set(keys[rank], own)
    for other, key in enumerate(keys):
        try:
            store.wait([key], timeout)
        except RuntimeError as error:
            raise StuckError(f"the schedule of pipeline rank {other}") from error
        theirs = store.get(key).decode()
        if theirs != own:
            raise UserError(
                f"--pipeline-schedule {schedule.name}: pipeline ranks {rank} and {other} have different "
                f"lists of actions ({own} and {theirs}); the same schedule files, profiles and versions of "
                "packages have to be on all machines"
            )

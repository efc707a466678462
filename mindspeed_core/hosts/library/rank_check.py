"""The check that the ranks of a library session run the same plan, from the same sources.

What the caller's own arguments say is its own business, and differs between ranks at will; what features read
is in the plan.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mindspeed_core.errors import SessionError
from mindspeed_core.runtime.rank_check import agreed, rank_facts

if TYPE_CHECKING:
    from mindspeed_core.run import DistInfo
    from mindspeed_core.session import Session

_round = itertools.count()


def check_agreement(session: Session, info: DistInfo) -> None:
    """Compare the ranks through the store; collective over all ranks.

    Does nothing in a world of one, without features, or with ``no_cross_rank_check``.

    Raises:
        SessionError: ranks differ; on every rank, and rank 0 has printed a table to stderr.
    """
    alone = info.world_size < 2 or not session.plan.features
    if alone or getattr(session.args, "no_cross_rank_check", False):
        return
    facts = {name: text for name, text in rank_facts(session).items() if not name.startswith("argument ")}
    # Sessions that follow each other share the default store: each check gets keys of its own.
    store: Any = dist.PrefixStore(
        f"mindspeed/library/{next(_round)}", dist.distributed_c10d._get_default_store()
    )
    if not agreed(store, info.rank, info.world_size, facts):
        raise SessionError(
            "the ranks of this world do not run the same plan; rank 0 printed who differs. Where other ranks "
            "do something else on purpose, pass no_cross_rank_check=True"
        )

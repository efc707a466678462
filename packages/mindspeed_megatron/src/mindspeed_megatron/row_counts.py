"""The rows that a dispatcher sends, where fewer are chosen than every token's experts.

Since 0.17 megatron-core sorts as many rows as tokens have experts together, and only where tokens are dropped
by capacity as many as were chosen. Positions that are no tokens are not chosen here.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from mindspeed_core.session import Session


def count_rows(session: Session, owner: str, dispatcher: Any) -> Callable[[bool], None]:
    """Let a dispatcher count the rows of calls for which fewer may be chosen.

    On a device the host waits for the count before rows are sorted. Dispatchers without an exchange between
    ranks count anyway, and those of features have ``chooses_fewer``.

    Args:
        session: the open session, which takes it back.
        owner: who asks, for listings.
        dispatcher: of a layer of experts; None where it has none.

    Returns:
        What to tell before each call whether fewer rows may be chosen.
    """
    if hasattr(dispatcher, "chooses_fewer"):
        return partial(setattr, dispatcher, "chooses_fewer")
    fewer = [False]
    if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
        plain = type(dispatcher).preprocess

        def preprocess(self: Any, routing_map: Tensor) -> Any:
            rows = plain(self, routing_map)
            if fewer[0] and not self.drop_and_pad:
                self.num_out_tokens = routing_map.sum()
                self._maybe_update_cuda_sync_point("before_permutation_1")
            return rows

        session.instances.set(owner, dispatcher, "preprocess", MethodType(preprocess, dispatcher))
    return partial(fewer.__setitem__, 0)

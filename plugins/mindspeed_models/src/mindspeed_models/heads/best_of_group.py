"""Experts of a part of the groups alone, those whose best experts have the highest scores (DeepSeek-V2).

megatron-core limits a choice to groups too, and ranks them by the sum of their best scores, of as many as a
token gets in each group (DeepSeek-V3): other groups, as soon as these are two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_megatron.layer_spec import Site, SpecEditor

if TYPE_CHECKING:
    from mindspeed_core.session import Session

FLAG = "--moe-router-best-of-group"


def best_of_groups(scores: Tensor, chosen: int, groups: int, kept: int) -> tuple[Tensor, Tensor]:
    """Choose experts of the groups whose best experts have the highest scores.

    Args:
        scores: ``[tokens, experts]``.
        chosen: experts for each token.
        groups: of neighbouring experts.
        kept: groups that a token's experts are from.

    Returns:
        Scores ``[tokens, chosen]`` and int64 indices of the experts, likewise.
    """
    best = scores.unflatten(1, (groups, -1)).amax(-1)
    first = best.topk(kept, dim=1, sorted=False).indices
    hidden = best.new_ones(best.shape).scatter(1, first, 0).bool()
    every = hidden.unsqueeze(-1).expand(-1, -1, scores.shape[1] // groups).flatten(1)
    found: tuple[Tensor, Tensor] = scores.masked_fill(every, float("-inf")).topk(chosen, dim=1)
    return found


class _BestOfGroup:
    """The choice, at the place where megatron-core's router asks for one that was made before."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the chosen experts, see `best_of_groups`."""
        assert num_groups is not None
        assert group_topk is not None
        return best_of_groups(scores, topk, num_groups, group_topk)


@cache
def _by_best(base: Any) -> Any:
    class ByBest(base):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.router_replay = _BestOfGroup()

    ByBest.__name__ = ByBest.__qualname__ = f"BestOfGroup{base.__name__}"
    return ByBest


def place_choice(session: Session, spec: Any, owner: str) -> Any:
    """Return the tree with routers that rank groups by their best expert.

    Args:
        session: counts what is placed.
        spec: the tree of a chunk.
        owner: the feature.

    Raises:
        UserError: this megatron-core has no place for another choice, or another router stands there.
    """
    if "router_replay" not in inspect.signature(topk_routing_with_score_function).parameters:
        raise UserError(
            f"{FLAG}: the router of this megatron-core takes no other choice; install 0.16 or later"
        )
    editor = SpecEditor(spec, owner=owner, session=session)

    def put(site: Site) -> Any:
        module: Any = site.spec.module if site.spec is not None else None
        if not (isinstance(module, type) and issubclass(module, TopKRouter)):
            raise UserError(
                f"{FLAG}: {site.role} ({site.path}) is {getattr(module, '__qualname__', module)} of "
                f"{site.placed_by or 'the model'}, which is no router of megatron-core; drop one of the two"
            )
        return site.carry(_by_best(module))

    editor.replace("router", put, wrap=True)
    return editor.spec

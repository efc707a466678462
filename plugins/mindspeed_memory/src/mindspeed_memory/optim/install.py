"""The block-wise AdamW in the place of the optimizers inside megatron-core's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer import ChainedOptimizer

from mindspeed_core.discovery.extensions import installed_extensions
from mindspeed_core.errors import UserError
from mindspeed_megatron.inner_optimizer import put_inside
from mindspeed_memory.extension_points import OPTIMIZER_STATES
from mindspeed_memory.optim.block_adamw import BlockAdamW
from mindspeed_memory.optim.options import COMPRESSED, SWAPPED, VIRTUAL, BlockOptions
from mindspeed_memory.optim.places import Budget, Compressor, Device, Host

if TYPE_CHECKING:
    from mindspeed_core.session import Session


@dataclass
class InnerOptimizers:
    """The block-wise optimizers of a session."""

    optimizers: list[BlockAdamW] = field(default_factory=list)


def install(session: Session, optimizer: Any, options: BlockOptions, pg: Any, owner: str) -> None:
    """Put a block-wise AdamW in the place of each Adam, torch's or one that has an ``adam_kernel``.

    Args:
        session: the session.
        optimizer: megatron-core's.
        options: forms and place of what it keeps.
        pg: process groups; budgets are those of a pipeline stage.
        owner: the feature's name.

    Raises:
        UserError: what is there computes other numbers.
    """
    former = _inner(optimizer)
    decoupled = {_is_decoupled(inner, owner) for inner in former}
    kernel = next((inner.adam_kernel for inner in former if hasattr(inner, "adam_kernel")), None)
    place = _place(session, options, pg)
    session.state(InnerOptimizers).optimizers = put_inside(
        session,
        optimizer,
        lambda groups: BlockAdamW(groups, options, place, decoupled=decoupled == {True}, kernel=kernel),
        owner=owner,
        pg=pg,
    )


def _place(session: Session, options: BlockOptions, pg: Any) -> Device:
    platform = session.platform
    contributed = installed_extensions(OPTIMIZER_STATES)
    if options.place in contributed.names():
        place: Device = contributed.get(options.place)(platform, session.args)
        return place
    if options.place == SWAPPED:
        return Host(platform, options.times)
    if options.place == VIRTUAL:
        stage = pg.pp.rank() if len(options.budget) > 1 else 0
        return Budget(platform, options.budget[stage])
    return Compressor(platform) if options.place == COMPRESSED else Device(platform)


def _inner(optimizer: Any) -> list[Any]:
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part.optimizer for part in chained if not getattr(part, "is_stub_optimizer", False)]


def _is_decoupled(inner: Any, owner: str) -> bool:
    if hasattr(inner, "adam_kernel"):
        # Adam by another kernel, of another feature: it says itself which of the two rules it computes.
        return bool(inner.decoupled)
    if type(inner) is torch.optim.AdamW:
        return True
    if type(inner) is torch.optim.Adam:
        return bool(inner.defaults.get("decoupled_weight_decay", False))
    kind = f"{type(inner).__module__}.{type(inner).__name__}"
    raise UserError(
        f"{owner}: the update is that of {kind}, whose numbers differ from those of torch's AdamW in their "
        "last bits; take away what brings it (TransformerEngine, Apex, another --optimizer), or the flags "
        f"that need {owner}"
    )

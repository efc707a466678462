"""Norms of layers computed again in backward, by what megatron-core's layers do when they are told to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.identity_op import IdentityOp

from mindspeed_memory.recompute.layers import computes_part_again, layers_of, selection_of

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_SWITCHES = {
    "input_layernorm": "recompute_input_layernorm",
    "pre_mlp_layernorm": "recompute_pre_mlp_layernorm",
}


def recompute_norms(
    session: Session,
    chunks: Sequence[Any],
    owner: str,
    *,
    count: int | None,
    per_rank: bool,
    swaps: bool = False,
) -> None:
    """Let the chosen layers compute their norms again.

    A norm that is part of the linear layer behind it keeps no output of its own, and is left alone.

    Args:
        session: takes the changes back when it closes.
        chunks: the model chunks of this rank.
        owner: the feature.
        count: layers of each chunk, or of the rank; None for all that are not computed again as a whole.
        per_rank: ``count`` is of the pipeline rank.
        swaps: see `selection_of`.
    """
    selection = selection_of(chunks, per_rank=per_rank, swaps=swaps)
    for placed in layers_of(chunks):
        if not computes_part_again(placed, selection, count):
            continue
        for norm, switch in _SWITCHES.items():
            if not isinstance(getattr(placed.layer, norm), IdentityOp):
                session.instances.set(owner, placed.layer, switch, True)

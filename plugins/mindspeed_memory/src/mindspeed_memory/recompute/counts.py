"""Number of layers that each chunk computes again as a whole."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_megatron.unwrap import unwrap
from mindspeed_memory.recompute.layers import blocks, selection_of

if TYPE_CHECKING:
    from mindspeed_core.session import Session


def spread_counts(
    session: Session, chunks: Sequence[Any], owner: str, *, per_rank: bool, spare_last: bool
) -> None:
    """Give every block of layers its own number of layers that are computed again as a whole.

    A block reads the number from its configuration, its layers have theirs from the model: only the block
    gets a copy.

    Args:
        session: takes the changes back when it closes.
        chunks: the model chunks of this rank.
        owner: the feature.
        per_rank: the number that was given is of the pipeline rank, and its chunks take turns.
        spare_last: not the last layer of the model, whose backward follows its forward at once.
    """
    selection = selection_of(chunks, per_rank=per_rank)
    predicts = any(getattr(unwrap(chunk), "mtp_process", False) for chunk in chunks)
    for chunk, block in blocks(chunks):
        layers = len(block.layers)
        whole = selection.whole_layers(chunk, layers)
        if spare_last and block.post_process and not predicts and whole == layers:
            whole -= 1
        config = copy.copy(block.config)
        config.recompute_num_layers = whole
        session.instances.set(owner, block, "config", config)

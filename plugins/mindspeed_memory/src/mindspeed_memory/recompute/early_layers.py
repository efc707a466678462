"""Choose the layers that are computed again early, and change them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_megatron.unwrap import unwrap
from mindspeed_memory.recompute.early import EarlyPasses, computed_again_early
from mindspeed_memory.recompute.layers import blocks, decoder_layers_of

if TYPE_CHECKING:
    from mindspeed_core.session import Session


def compute_again_in_advance(
    session: Session, chunks: Sequence[Any], owner: str, passes: EarlyPasses
) -> None:
    """Let the layers that blocks compute again do so when they are told to.

    Not the model's last layer: its backward pass follows its forward pass at once.

    Args:
        session: takes the changes back when it closes.
        chunks: the model chunks of this rank.
        owner: the feature.
        passes: tells when.
    """
    # Predictions of further tokens stand between the last layer and its backward pass.
    predicts = any(getattr(unwrap(chunk), "mtp_process", False) for chunk in chunks)
    for _, block in blocks(chunks):
        layers = list(block.layers)
        count = min(block.config.recompute_num_layers or 0, len(layers))
        if count == len(layers) and block.post_process and not predicts:
            count -= 1
        for layer in layers[:count]:
            forward = computed_again_early(layer, passes, always=True)
            session.instances.set(owner, layer, "forward", forward)
        config = copy.copy(block.config)
        config.recompute_granularity = None
        session.instances.set(owner, block, "config", config)


def compute_again_in_bubble(session: Session, chunks: Sequence[Any], owner: str, passes: EarlyPasses) -> None:
    """Let every layer drop its activations in the passes that are told to.

    Args:
        session: takes the changes back when it closes.
        chunks: the model chunks of this rank.
        owner: the feature.
        passes: tells which, and when they are computed again.
    """
    for placed in decoder_layers_of(chunks):
        forward = computed_again_early(placed.layer, passes, always=False)
        session.instances.set(owner, placed.layer, "forward", forward)

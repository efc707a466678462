"""What attention and norms save for backward, kept on the host."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP

from mindspeed_memory.names import MODULES
from mindspeed_memory.recompute.dense import output_checkpointed
from mindspeed_memory.recompute.layers import PlacedLayer, blocks, chosen_whole, layers_of

if TYPE_CHECKING:
    from mindspeed_core.session import Session
    from mindspeed_memory.saved.engine import SavedTensors

_RECOMPUTED_NORM = {
    "self_attention": "recompute_input_layernorm",
    "mlp": "recompute_pre_mlp_layernorm",
}


def swap_modules(
    session: Session,
    chunks: Sequence[Any],
    owner: str,
    engine: SavedTensors,
    *,
    modules: Sequence[str],
    per_rank: bool,
) -> None:
    """Put away what chosen modules of the layers save.

    With full recomputation the layers that it chose compute their feed-forward part again instead of all, and
    attention is swapped; without it every layer swaps. The last layer of the model does not: backward needs
    it at once.

    Args:
        session: takes the changes back when it closes.
        chunks: the model chunks of this rank.
        owner: the feature.
        engine: puts tensors away.
        modules: names of `MODULES`.
        per_rank: numbers of layers are of the pipeline rank.
    """
    recomputed = chosen_whole(chunks, per_rank=per_rank)
    for placed in layers_of(chunks):
        if recomputed is not None and (placed.chunk, placed.index) not in recomputed:
            continue
        if recomputed is not None:
            _recompute_feed_forward(session, placed, owner)
        if placed.last:
            continue
        for name in modules:
            attribute = MODULES[name]
            module = getattr(placed.layer, attribute)
            if not isinstance(module, IdentityOp):
                spares = bool(getattr(placed.layer, _RECOMPUTED_NORM.get(attribute, ""), False))
                scoped = engine.scope(module.forward, spares_input=spares)
                session.instances.set(owner, module, "forward", scoped)
    if recomputed is None:
        return
    for _, block in blocks(chunks):
        config = copy.copy(block.config)
        config.recompute_granularity = None
        session.instances.set(owner, block, "config", config)


def _recompute_feed_forward(session: Session, placed: PlacedLayer, owner: str) -> None:
    mlp = placed.layer.mlp
    if isinstance(mlp, MLP):
        session.instances.set(owner, mlp, "forward", output_checkpointed(mlp))
    elif hasattr(mlp, "moe_layer_recompute"):
        session.instances.set(owner, mlp, "moe_layer_recompute", True)

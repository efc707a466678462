"""Offloading of what attention and norms save for backward."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP

from mindspeed_core.errors import UserError
from mindspeed_core.flags.presets import DEFAULT
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.unwrap import unwrap
from mindspeed_memory.names import MODULES
from mindspeed_memory.recompute.dense import output_checkpointed
from mindspeed_memory.recompute.layers import PlacedLayer, blocks, chosen_whole, layers_of, selection_of

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from mindspeed_core.session import Session
    from mindspeed_memory.saved.engine import SavedTensors


def swap_modules(
    session: Session,
    chunks: Sequence[Any],
    owner: str,
    engine: SavedTensors,
    *,
    modules: Sequence[str],
    models: Mapping[str, int] | None = None,
    per_rank: bool,
    spare_last: bool = False,
) -> None:
    """Put away what chosen modules of the layers save.

    With full recomputation the layers that it chose compute their feed-forward part again instead of all, and
    attention is swapped; without it every layer swaps, and the first ``--recompute-num-layers`` compute their
    feed-forward part again. The last layer of the model swaps nothing: backward needs it at once.

    Args:
        session: takes the changes back when it closes.
        chunks: the model chunks of this rank.
        owner: the feature.
        engine: puts tensors away.
        modules: names of `MODULES`.
        models: sub-models that swap, by name, with how many of their first layers do; None for all layers.
        per_rank: numbers of layers are of the pipeline rank.
        spare_last: the last layer of the model computes nothing again.
    """
    recomputed = chosen_whole(chunks, per_rank=per_rank)
    numbered = selection_of(chunks, per_rank=per_rank, swaps=True) if recomputed is None else None
    named = None if models is None else _layers_of_models(session, chunks, models)
    absent = dict.fromkeys(modules, True)
    for placed in layers_of(chunks):
        if recomputed is not None and (placed.predicts or (placed.chunk, placed.index) not in recomputed):
            continue
        again = recomputed is not None or (
            numbered is not None and not placed.predicts and numbered.is_whole(placed.index, placed.chunk)
        )
        if again and not (spare_last and placed.last):
            _recompute_feed_forward(session, placed, owner)
        if placed.last and named is None:
            attention = placed.layer.self_attention
            session.instances.set(owner, attention, "forward", engine.before(attention.forward))
        if placed.last or (named is not None and id(placed.layer) not in named):
            continue
        for name in modules:
            module = getattr(placed.layer, MODULES[name])
            if not isinstance(module, IdentityOp):
                absent[name] = False
                session.instances.set(owner, module, "forward", engine.scope(module.forward))
    nowhere = [name for name, lacks in absent.items() if lacks]
    given = session.provenance.get("swap_modules", DEFAULT) != DEFAULT
    if given and 0 < len(nowhere) < len(modules):
        shown = ", ".join(nowhere)
        logger.warning("--swap-modules: no layer here has %s, so that nothing of it swaps", shown)
    if recomputed is None:
        return
    for _, block in blocks(chunks):
        config = copy.copy(block.config)
        config.recompute_granularity = None
        session.instances.set(owner, block, "config", config)


def _layers_of_models(session: Session, chunks: Sequence[Any], models: Mapping[str, int]) -> set[int]:
    """Return the identities of the first layers of named sub-models.

    Layers count over the whole model, whichever pipeline stage has them. Collective over all ranks: a stage
    need not hold every sub-model. In a dry run the others do not exist, and nothing is refused.

    Raises:
        UserError: no rank has a sub-model of that name with layers; names those that there are.
    """
    found: set[int] = set()
    there: set[str] = set()
    for _, block in blocks(chunks):
        names = _names_of(chunks, block)
        there |= names
        for name in names & models.keys():
            found |= {id(layer) for layer in block.layers if layer.layer_number <= models[name]}
    everywhere = set().union(*all_gather_values(there))
    missing = sorted(models.keys() - everywhere)
    if missing and not session.platform.dry_run:
        raise UserError(
            f"--swap-models {missing[0]}: no part of the model with layers has this name; there are "
            f"{', '.join(sorted(everywhere))}"
        )
    return found


def _names_of(chunks: Sequence[Any], block: Any) -> set[str]:
    """Return the names of the modules that hold a block, and the block's own: each part and the whole."""
    for chunk in chunks:
        for name, module in unwrap(chunk).named_modules():
            if module is block:
                parts = name.split(".")
                return {*parts, *(".".join(parts[:end]) for end in range(1, len(parts) + 1))} - {""}
    return set()


def _recompute_feed_forward(session: Session, placed: PlacedLayer, owner: str) -> None:
    mlp = placed.layer.mlp
    if isinstance(mlp, MLP):
        session.instances.set(owner, mlp, "forward", output_checkpointed(mlp))
    elif hasattr(mlp, "moe_layer_recompute"):
        session.instances.set(owner, mlp, "moe_layer_recompute", True)

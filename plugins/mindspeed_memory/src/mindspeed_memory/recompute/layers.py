"""The transformer layers of a rank, with their place in the model chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from mindspeed_core.errors import UserError
from mindspeed_core.megatron.unwrap import unwrap
from mindspeed_memory.recompute.selection import Selection


@dataclass(frozen=True)
class PlacedLayer:
    """A layer and where it is.

    Attributes:
        layer: the module.
        index: its number within the chunk, from 0.
        chunk: number of the chunk within the rank.
        last: no layer of the model follows it.
    """

    layer: TransformerLayer
    index: int
    chunk: int
    last: bool


def blocks(chunks: Sequence[Any]) -> Iterator[tuple[int, TransformerBlock]]:
    """Yield every block of layers with the number of its chunk.

    Args:
        chunks: the model chunks of the rank, with or without wrappers.
    """
    for number, chunk in enumerate(chunks):
        for module in unwrap(chunk).modules():
            if isinstance(module, TransformerBlock):
                # A rank's own loop may bring its chunks one at a time.
                stage = getattr(module, "vp_stage", None)
                yield (number if len(chunks) > 1 or stage is None else stage), module


def layers_of(chunks: Sequence[Any]) -> Iterator[PlacedLayer]:
    """Yield the layers of all blocks; what a prediction of further tokens consists of is none of them."""
    for chunk, block in blocks(chunks):
        count = len(block.layers)
        for index, layer in enumerate(block.layers):
            if isinstance(layer, TransformerLayer):
                yield PlacedLayer(layer, index, chunk, block.post_process and index == count - 1)


def selection_of(chunks: Sequence[Any], *, per_rank: bool, swaps: bool = False) -> Selection:
    """Return the order in which layers recompute, by the configuration of the model.

    Args:
        chunks: the model chunks of the rank.
        per_rank: ``--enable-recompute-layers-per-pp-rank``.
        swaps: attention is swapped, and without full recomputation the number of its layers is that of those
            which compute their feed-forward part again.

    Raises:
        UserError: every layer is computed again as a whole already.
    """
    config = _config(chunks)
    if config is None:
        raise UserError("the model has no layers of megatron-core whose parts could be computed again")
    virtual = getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
    whole = 0
    if config.recompute_granularity == "full":
        if config.recompute_method == "uniform":
            raise UserError(
                "--recompute-method uniform computes every layer again as a whole: no layer is left whose "
                "parts could be; use --recompute-method block"
            )
        whole = config.recompute_num_layers or 0
    elif swaps:
        whole = config.recompute_num_layers or 0
    return Selection(whole, virtual, per_rank)


def chosen_whole(chunks: Sequence[Any], *, per_rank: bool) -> frozenset[tuple[int, int]] | None:
    """Return chunk and index of every layer that full recomputation computes again; None without it.

    Args:
        chunks: the model chunks of the rank.
        per_rank: ``--enable-recompute-layers-per-pp-rank``.
    """
    config = _config(chunks)
    if config is None or config.recompute_granularity != "full":
        return None
    layers = list(layers_of(chunks))
    if config.recompute_method != "uniform":
        selection = selection_of(chunks, per_rank=per_rank)
        layers = [placed for placed in layers if selection.is_whole(placed.index, placed.chunk)]
    return frozenset((placed.chunk, placed.index) for placed in layers)


def _config(chunks: Sequence[Any]) -> Any:
    """Return the configuration of the model: that of its layers, since blocks may have one of their own."""
    return next((placed.layer.config for placed in layers_of(chunks)), None)

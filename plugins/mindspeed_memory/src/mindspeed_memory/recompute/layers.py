"""The transformer layers of a rank, with their place in the model chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from mindspeed_core.errors import UserError
from mindspeed_megatron.unwrap import unwrap


@dataclass(frozen=True)
class Selection:
    """Order of the layers of a pipeline rank that recompute.

    Layers are numbered within their model chunk, also where stages hold different numbers of them. Those
    computed again as a whole come first; of the following, parts are (activation function, norms).

    Attributes:
        whole: how many are computed again as a whole (``--recompute-num-layers`` with ``block``).
        chunks: model chunks of the rank.
        per_rank: numbers are of the rank, and its chunks take turns; otherwise they are of each chunk.
    """

    whole: int = 0
    chunks: int = 1
    per_rank: bool = False

    def place(self, index: int, chunk: int) -> int:
        """Return the place of a layer in the order of those that recompute.

        Args:
            index: of the layer within its chunk.
            chunk: number of the chunk.
        """
        return index * self.chunks + chunk if self.per_rank else index

    def is_whole(self, index: int, chunk: int) -> bool:
        """Return whether a layer is computed again as a whole."""
        return self.place(index, chunk) < self.whole

    def is_partial(self, index: int, chunk: int, count: int | None) -> bool:
        """Return whether a part of a layer is computed again.

        Args:
            index: of the layer within its chunk.
            chunk: number of the chunk.
            count: how many layers do so, behind those of `whole`; None for all of them.
        """
        place = self.place(index, chunk)
        return self.whole <= place and (count is None or place < self.whole + count)

    def whole_layers(self, chunk: int, layers: int) -> int:
        """Return how many layers of a chunk are computed again as a whole.

        Args:
            chunk: its number.
            layers: how many it has.
        """
        return sum(self.is_whole(index, chunk) for index in range(layers))


@dataclass(frozen=True)
class PlacedLayer:
    """A layer and where it is.

    Attributes:
        layer: the module.
        index: its number within the chunk, from 0; those of predictions follow the others.
        chunk: number of the chunk within the rank.
        last: no layer of the model follows it.
        predicts: it predicts further tokens, or stands elsewhere outside of the blocks of layers: numbers of
            layers do not count it.
    """

    layer: TransformerLayer
    index: int
    chunk: int
    last: bool
    predicts: bool = False


def blocks(chunks: Sequence[Any], only: int | None = None) -> Iterator[tuple[int, TransformerBlock]]:
    """Yield every block of layers with the number of its chunk.

    Args:
        chunks: the model chunks of the rank, with or without wrappers.
        only: of the chunk at this position alone.
    """
    for number, chunk in enumerate(chunks):
        if only not in (None, number):
            continue
        for module in unwrap(chunk).modules():
            if isinstance(module, TransformerBlock):
                # A rank's own loop may bring its chunks one at a time.
                stage = getattr(module, "vp_stage", None)
                yield (number if len(chunks) > 1 or stage is None else stage), module


def layers_of(chunks: Sequence[Any]) -> Iterator[PlacedLayer]:
    """Yield every transformer layer of a rank: those of blocks, then those that predict further tokens.

    Args:
        chunks: the model chunks of the rank, with or without wrappers.
    """
    for position, chunk in enumerate(chunks):
        in_blocks = list(blocks(chunks, only=position))
        places = [
            (layer, index, number, block.post_process and index == len(block.layers) - 1)
            for number, block in in_blocks
            for index, layer in enumerate(block.layers)
        ]
        known = {id(layer) for layer, *_ in places}
        further = [
            module
            for module in unwrap(chunk).modules()
            if isinstance(module, TransformerLayer) and id(module) not in known
        ]
        for layer, index, number, last in places:
            if isinstance(layer, TransformerLayer):
                yield PlacedLayer(layer, index, number, last and not further)
        number = in_blocks[0][0] if in_blocks else position
        for index, layer in enumerate(further, start=len(places)):
            yield PlacedLayer(layer, index, number, layer is further[-1], predicts=True)


def decoder_layers_of(chunks: Sequence[Any]) -> Iterator[PlacedLayer]:
    """Yield the layers of all blocks: those that numbers of layers count."""
    return (placed for placed in layers_of(chunks) if not placed.predicts)


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
    layers = list(decoder_layers_of(chunks))
    if config.recompute_method != "uniform":
        selection = selection_of(chunks, per_rank=per_rank)
        layers = [placed for placed in layers if selection.is_whole(placed.index, placed.chunk)]
    return frozenset((placed.chunk, placed.index) for placed in layers)


def computes_part_again(placed: PlacedLayer, selection: Selection, count: int | None) -> bool:
    """Return whether a part of a layer is computed again.

    Predictions of further tokens follow only where all layers do: no number counts them. megatron-core does
    not compute them again as a whole with ``--recompute-method block``, which is all that goes with parts.

    Args:
        placed: the layer.
        selection: see `selection_of`.
        count: how many layers do so; None for all.
    """
    if placed.predicts:
        return count is None
    return selection.is_partial(placed.index, placed.chunk, count)


def _config(chunks: Sequence[Any]) -> Any:
    """Return the configuration of the model: that of its layers, since blocks may have one of their own."""
    return next((placed.layer.config for placed in layers_of(chunks)), None)

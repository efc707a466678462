"""The V-shaped placement: stages run down the ranks with the first chunks and up again with the second.

Source of the arithmetic: the "ZB-V" schedule of zero-bubble pipeline parallelism (arXiv 2401.10241).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_core.run import ChunkPlace

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def route(pp_size: int, chunks: int) -> tuple[tuple[int, int], ...]:
    """Rank and chunk of every stage: odd chunks run from the last rank to the first."""
    return tuple(
        (pp_size - 1 - step if chunk % 2 else step, chunk)
        for chunk in range(chunks)
        for step in range(pp_size)
    )


def places(pp_rank: int, pp_size: int, chunks: int) -> tuple[ChunkPlace, ...]:
    """Where in the model the chunks of a rank are."""
    last = pp_size * chunks - 1
    return tuple(
        ChunkPlace(chunk if chunks > 1 else None, stage, stage == 0, stage == last)
        for stage, (rank, chunk) in enumerate(route(pp_size, chunks))
        if rank == pp_rank
    )


def lay_out(config: TransformerConfig) -> None:
    """Give every stage as many layers, numbered in the order of the stages."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    size, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    each = config.num_layers // (size * chunks)
    order = {place: stage for stage, place in enumerate(route(size, chunks))}

    class Layout(PipelineParallelLayerLayout):
        def get_layer_offset(
            self, layer_type: Any = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
        ) -> int:
            from megatron.core import parallel_state

            rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
            return each * order[rank, vp_stage or 0]

    stages: list[list[Any]] = [[LayerType.decoder] * each for _ in range(size * chunks)]
    for chunk in range(chunks):
        for rank in range(size):
            if order[rank, chunk] == 0:
                stages[chunk * size + rank].insert(0, LayerType.embedding)
            if order[rank, chunk] == size * chunks - 1:
                stages[chunk * size + rank].append(LayerType.loss)
    config.pipeline_model_parallel_layout = Layout(stages, size)

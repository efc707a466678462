"""megatron-core's layout of layers for stages that do not run down the ranks again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from mindspeed_pp.placement import Placement


class PlacedLayout(PipelineParallelLayerLayout):
    """A layout whose stages live where a placement says.

    megatron-core numbers layers rank by rank within a chunk; here they are numbered in the order of the
    stages.
    """

    def __init__(self, stages: Sequence[Sequence[LayerType]], placement: Placement) -> None:
        """Lay stages out.

        Args:
            stages: what each stage of the model holds; copies of the model hold the same.
            placement: of the stages.
        """
        size, chunks = placement.size, placement.stages // placement.size
        held = [
            stages[placement.position(placement.held[rank][chunk])]
            for chunk in range(chunks)
            for rank in range(size)
        ]
        super().__init__([list(stage) for stage in held], size)
        self.placement = placement
        self.stages = [list(stage) for stage in stages]
        self.flatten_layout = [layer for stage in self.stages for layer in stage]

    def __deepcopy__(self, memo: Any) -> PlacedLayout:
        """Return a copy; megatron-core copies configurations."""
        return PlacedLayout(self.stages, self.placement)

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int) -> bool:
        """Check the layout; predictions are never on ranks of their own here."""
        super().validate_layer_layout(num_layers, mtp_num_layers)
        return False

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return how many layers of a kind the stages before a chunk have."""
        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        place = self.placement.position(self.placement.held[rank][vp_stage or 0])
        return sum(layer == layer_type for before in self.stages[:place] for layer in before)


def placed(config: Any, placement: Placement) -> PlacedLayout:
    """Return the layout of a configuration, or its even split, for another placement.

    Args:
        config: megatron-core's, complete but for its layout.
        placement: of as many stages as the configuration has.
    """
    size, depth = placement.size, placement.depth
    given: Any = config.pipeline_model_parallel_layout
    if isinstance(given, PlacedLayout):
        return given
    if given is not None:
        stages = [given.layout[stage % size][stage // size] for stage in range(depth)]
        return PlacedLayout(stages, placement)
    each = config.num_layers // depth
    split = [[LayerType.decoder] * each for _ in range(depth)]
    split[0].insert(0, LayerType.embedding)
    split[-1] += [LayerType.mtp] * (config.mtp_num_layers or 0) + [LayerType.loss]
    return PlacedLayout(split, placement)

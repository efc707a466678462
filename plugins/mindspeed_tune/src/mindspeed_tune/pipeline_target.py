"""A pipeline that numbers are asked for, and the stages of the small pipeline that its own are made of."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_tune.layout import Layout
from mindspeed_tune.small_pipeline import FIRST, LAST, MIDDLE

WHOLE = 3
"""A stage that has embedding and head: the only one of a model without a pipeline."""
MADE_OF: dict[int, tuple[tuple[int, int], ...]] = {
    FIRST: ((FIRST, 1),),
    MIDDLE: ((MIDDLE, 1),),
    LAST: ((LAST, 1),),
}
MADE_OF[WHOLE] = ((FIRST, 1), (LAST, 1), (MIDDLE, -1))
"""Stages of the small pipeline that add up to each kind of stage, with their signs."""


@dataclass(frozen=True)
class Target:
    """A pipeline that a cell's numbers are asked for.

    Attributes:
        layout: of the launch.
        layers: of the model, a multiple of the pipeline's chunks.
        microbatches: of a step.
        micro_batch_size: their size.
        overlap: gradients are exchanged behind backward passes.
        model_flops: operations of the model in a step; 0 where they are not known.
        overlap_gather: updated parameters are gathered behind forward passes.
    """

    layout: Layout
    layers: int
    microbatches: int
    micro_batch_size: int
    overlap: bool = False
    model_flops: float = 0.0
    overlap_gather: bool = False

    def kind(self, stage: int) -> int:
        """Return what a stage is made of besides its layers."""
        last = self.layout.pp - 1
        return WHOLE if last == 0 else FIRST if stage == 0 else LAST if stage == last else MIDDLE

    def chunks(self, stage: int) -> list[int]:
        """Return what every chunk of a stage is made of."""
        kind = self.kind(stage)
        chunks = [MIDDLE] * self.layout.vpp
        if self.layout.vpp == 1:
            return [kind]
        if kind == FIRST:
            chunks[0] = FIRST
        if kind == LAST:
            chunks[-1] = LAST
        return chunks

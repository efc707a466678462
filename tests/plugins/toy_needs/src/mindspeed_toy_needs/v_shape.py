"""The V-shaped placement: stages run down the ranks with the first chunks and up again with the second.

Source of the arithmetic: the "ZB-V" schedule of zero-bubble pipeline parallelism (arXiv 2401.10241).
"""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from mindspeed_core.session import Session


class _Mirrored:
    """The pipeline group as the second chunks see it: megatron-core numbers layers by its rank."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def rank(self) -> int:
        """The position counted from the last rank."""
        return int(self._group.size() - 1 - self._group.rank())

    def size(self) -> int:
        """As many ranks."""
        return int(self._group.size())


def route(pp_size: int, chunks: int) -> tuple[tuple[int, int], ...]:
    """Rank and chunk of every stage: odd chunks run from the last rank to the first."""
    return tuple(
        (pp_size - 1 - step if chunk % 2 else step, chunk)
        for chunk in range(chunks)
        for step in range(pp_size)
    )


def build_chunk(
    session: Session,
    args: Namespace,
    config: TransformerConfig,
    layer_spec: TransformerBlockSubmodules,
    vp_stage: int | None,
    global_stage: int,
    pg: ProcessGroupCollection,
) -> MegatronModule | None:
    """An odd chunk, built for its place in the V; None leaves even chunks to the host."""
    if not vp_stage or vp_stage % 2 == 0:
        return None
    mirrored = copy.copy(pg)
    mirrored.pp = _Mirrored(pg.pp)
    # Counted from the other end of the row of stages that the host built this chunk for.
    stage = (2 * vp_stage + 1) * pg.pp.size() - 1 - global_stage
    total = args.virtual_pipeline_model_parallel_size * pg.pp.size()
    chunk: MegatronModule = session.default(
        "build_model_chunk",
        args=args,
        config=config,
        layer_spec=layer_spec,
        pre_process=stage == 0,
        post_process=stage == total - 1,
        vp_stage=vp_stage,
        global_stage=stage,
        pg=mirrored,
    )
    return chunk

"""Places of a rank's chunks in the model: the default of the stage, and questions about all ranks."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import hookimpl
from mindspeed_core.run import ChunkPlace

if TYPE_CHECKING:
    from mindspeed_core.session import Session


@hookimpl(trylast=True)
def place_chunks(args: Namespace, pp_rank: int, pp_size: int) -> tuple[ChunkPlace, ...]:
    """Return megatron-core's places: down the ranks with the first chunks, again with the second ones."""
    virtual = args.virtual_pipeline_model_parallel_size
    last = pp_size * (virtual or 1) - 1
    stages = [chunk * pp_size + pp_rank for chunk in range(virtual or 1)]
    return tuple(
        ChunkPlace(chunk if virtual else None, stage, stage == 0, stage == last)
        for chunk, stage in enumerate(stages)
    )


def places_of_rank(session: Session, args: Namespace, pg: Any) -> tuple[ChunkPlace, ...]:
    """Return the places of this rank's chunks.

    Args:
        session: the open one.
        args: the arguments.
        pg: the process groups; None for a process without any.
    """
    rank, size = (0, 1) if pg is None else (pg.pp.rank(), pg.pp.size())
    return tuple(session.call("place_chunks", args=args, pp_rank=rank, pp_size=size))


def place_of_chunk(session: Session, args: Namespace, pg: Any, vp_stage: int | None) -> ChunkPlace:
    """Return the place of one of this rank's chunks."""
    return places_of_rank(session, args, pg)[vp_stage or 0]


def loss_rank(session: Session, args: Namespace, pp_size: int) -> int:
    """Return the pipeline rank that computes losses."""
    for rank in range(pp_size):
        places = session.call("place_chunks", args=args, pp_rank=rank, pp_size=pp_size)
        if any(place.post_process for place in places):
            return rank
    raise ValueError("no chunk of any pipeline rank holds the loss")

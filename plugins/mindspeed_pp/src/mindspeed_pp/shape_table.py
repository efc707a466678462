"""Shapes of micro-batches of different lengths: one table per step instead of an exchange per message.

The rank of the first stage reads the step's micro-batches ahead and tells the others how large they are.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_core.errors import DataError
from mindspeed_core.run import TensorSpec

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_pp.indexed_batches import IndexedBatches
    from mindspeed_pp.schedule import Schedule

_UNKNOWN, _EMPTY = -1, 0
_COLUMNS = 2


def sizes_of_step(
    run: Run, pg: Any, schedule: Schedule, batches: Sequence[IndexedBatches | None]
) -> list[tuple[int, int]]:
    """Return micro-batch size and sequence length of every micro-batch, the same on all pipeline ranks.

    Collective over pipeline and tensor-parallel ranks.

    Raises:
        DataError: a micro-batch has no tokens to measure, on every rank.
    """
    first = schedule.placement.ranks[0]
    table = torch.full((schedule.microbatches, _COLUMNS), _EMPTY, dtype=torch.int32, device=run.dist.device)
    if pg.pp.rank() == first:
        chunk = schedule.placement.chunk(0)
        source = batches[chunk if len(batches) > 1 else 0]
        if source is not None:
            for i in range(schedule.microbatches):
                table[i] = torch.tensor(_measured(source.look(i)), dtype=torch.int32)
        if pg.tp.size() > 1:
            # Scripts let the first tensor-parallel rank alone read samples.
            dist.broadcast(table, group=pg.tp, group_src=0)
    dist.broadcast(table, group=pg.pp, group_src=first)
    sizes = [(int(b), int(s)) for b, s in table.tolist()]
    if any(size[0] <= 0 for size in sizes):
        raise DataError(
            "--variable-seq-lengths: a micro-batch of the first pipeline stage is no dictionary with tokens "
            "[b, s], so the other stages cannot be told its size; use megatron-core's own schedules"
        )
    return sizes


def _measured(sample: Any) -> tuple[int, int]:
    tokens = sample.get("tokens") if isinstance(sample, Mapping) else getattr(sample, "tokens", None)
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != _COLUMNS:
        return _UNKNOWN, _UNKNOWN
    return tokens.shape[0], tokens.shape[1]


def shapes_of_step(
    run: Run, args: Namespace, config: Any, sizes: Sequence[tuple[int, int]]
) -> Callable[[int], tuple[TensorSpec, ...]]:
    """Return the function from a micro-batch to the tensors that cross from stage to stage.

    Raises:
        DataError: a length is not divisible by the ranks that share a sequence.
    """
    parts = config.context_parallel_size
    if config.sequence_parallel:
        parts *= config.tensor_model_parallel_size
    known: dict[tuple[int, int], tuple[TensorSpec, ...]] = {}
    for batch, length in sizes:
        if length % parts:
            raise DataError(
                f"--variable-seq-lengths: a micro-batch has sequences of {length} tokens, which "
                f"{parts} ranks share; pad them to a multiple of {parts}"
            )
        if (batch, length) not in known:
            of_this = Namespace(**(vars(args) | {"micro_batch_size": batch, "seq_length": length}))
            schema = run.session.call("boundary_schema", args=of_this, config=config)
            known[batch, length] = schema.tensors
    return lambda microbatch: known[sizes[microbatch]]

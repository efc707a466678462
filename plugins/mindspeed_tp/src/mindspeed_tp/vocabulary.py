"""The embedding of a vocabulary spread over ranks, without assignments by a mask.

Rows of other ranks are filled with zeros under a mask, which is an operation of one shape whatever the mask:
an assignment by a mask asks the host how many elements it has, which a device answers only when it has caught
up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from mindspeed_tp.partition import Partition
from mindspeed_tp.rows import Rows

if TYPE_CHECKING:
    import torch

    from mindspeed_core.session import Session


class ScatteredRows(torch.autograd.Function):
    """Sum ``[s, ...]`` over the ranks and leave each its part; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        """Sum and scatter."""
        ctx.rows = rows
        return rows.start_scatter(x.contiguous())()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Gather."""
        return ctx.rows.start_gather(gradients[0])(), None


def embedded(module: Any, ids: Tensor, rows: Rows) -> Tensor:
    """Look up the ids in megatron-core's ``VocabParallelEmbedding``.

    Args:
        module: the embedding.
        ids: ``[b, s]``.
        rows: parts of the sequence, where the embedding leaves each rank its own.

    Returns:
        ``[b, s, h]``, or this rank's part ``[s_r, b, h]`` where it scatters.
    """
    if module.tp_group.size() == 1:
        found = _looked_up(module, ids)
        return found.transpose(0, 1).contiguous() if module.reduce_scatter_embeddings else found
    others = (ids < module.vocab_start_index) | (ids >= module.vocab_end_index)
    found = _looked_up(module, (ids - module.vocab_start_index).masked_fill_(others, 0))
    found = found.masked_fill_(others.unsqueeze(-1), 0)
    if not module.reduce_scatter_embeddings:
        summed: Tensor = reduce_from_tensor_model_parallel_region(found, group=module.tp_group)
        return summed
    result: Tensor = ScatteredRows.apply(found.transpose(0, 1), rows)
    return result


def _looked_up(module: Any, ids: Tensor) -> Tensor:
    if module.deterministic_mode:
        found: Tensor = module.weight[ids]
        return found
    return F.embedding(ids, module.weight)


def look_up_without_masks(
    session: Session,
    owner: str,
    model: Sequence[torch.nn.Module],
    group: ProcessGroup,
    sequence: Partition | None,
) -> None:
    """Let the embeddings of these chunks look ids up by `embedded`.

    Embeddings of another class, and those that somebody changed before, stay as they are.

    Args:
        session: records the changes.
        owner: name of the feature.
        model: the chunks.
        group: ranks that share the vocabulary.
        sequence: parts in which ranks hold a sequence, where they are not equal.
    """
    rows = Rows(group, sequence)
    for chunk in model:
        for module in chunk.modules():
            if type(module).forward is VocabParallelEmbedding.forward and "forward" not in vars(module):
                session.instances.set(owner, module, "forward", partial(embedded, module, rows=rows))

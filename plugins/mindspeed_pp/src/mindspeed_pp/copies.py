"""Copies of pipeline stages on several ranks: kept alike by one reduction per stage, saved once.

The ranks that hold a stage hold the same stages all, in the same order, each in one of the copies. So the
gradients of a stage are summed over a group of those ranks and their data-parallel ranks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from copy import copy
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.distributed import DistributedDataParallel
from megatron.core.parallel_state import RankGenerator
from torch.utils._pytree import tree_iter

from mindspeed_core.errors import SessionError
from mindspeed_megatron.unwrap import unwrap
from mindspeed_pp.placement import Placement

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_UNITED = {"pp.copies.dp": "dp-pp", "pp.copies.dp_cp": "dp-cp-pp"}
"""Name of the groups of copies, and the parallelism whose ranks hold them."""


def holders(placement: Placement) -> list[list[int]]:
    """Return the pipeline ranks of all copies, for each stage of the model."""
    depth, ranks = placement.depth, placement.ranks
    return [sorted(ranks[stage] for stage in range(at, placement.stages, depth)) for at in range(depth)]


def create_groups(session: Session, args: Namespace, pg: Any, placement: Placement) -> None:
    """Create the groups over which the gradients of each stage are summed. Collective over the world.

    Args:
        session: takes the groups down when it closes.
        args: the arguments.
        pg: the process groups.
        placement: with copies.

    Raises:
        SessionError: ranks are in an order that is not megatron-core's.
    """
    # megatron-core's layouts count the layers of one chunk where nobody says that there are several.
    parallel_state.set_virtual_pipeline_model_parallel_world_size(placement.copies)
    order = "tp-cp-ep-pp-dp" if getattr(args, "use_tp_pp_dp_mapping", False) else "tp-cp-ep-dp-pp"
    ranks = RankGenerator(pg.tp.size(), 1, pg.dp.size(), pg.pp.size(), pg.cp.size(), order)
    pipelines = ranks.get_ranks("pp")
    if dist.get_process_group_ranks(pg.pp) not in pipelines:
        raise SessionError(
            "--pipeline-schedule chimera: ranks are in another order than --use-tp-pp-dp-mapping says; build "
            "the process groups with megatron-core's orders"
        )
    place = {rank: at for pipeline in pipelines for at, rank in enumerate(pipeline)}
    for name, united in _UNITED.items():
        for at, held_by in enumerate(holders(placement)):
            lists = [[r for r in group if place[r] in held_by] for group in ranks.get_ranks(united)]
            session.groups.create(f"{name}.{at}", lists)


def mark_copies(
    session: Session, chunks: Sequence[Any], pg: Any, placement: Placement, owner: str, *, sharded: bool
) -> None:
    """Let checkpoints hold one copy of each stage, and the gradient norm count one.

    Args:
        session: takes the changes back when it closes.
        chunks: of this rank, before they are wrapped.
        pg: the process groups.
        placement: with copies.
        owner: the feature.
        sharded: the optimizer holds, and counts, each part of a stage on one rank alone.
    """
    replicas = pg.dp_cp.size()
    for chunk, stage in zip(chunks, placement.held[pg.pp.rank()]):
        number = stage // placement.depth
        plain = unwrap(chunk)
        if getattr(plain, "pre_process", False) and plain.share_embeddings_and_output_weights:
            # megatron-core marks that of the first rank alone, and gives it a bucket of its own.
            plain.shared_embedding_or_output_weight().shared_embedding = True
        if number == 0:
            continue
        describe = plain.sharded_state_dict

        def described(
            *given: Any, describe: Any = describe, number: int = number, **named: Any
        ) -> Mapping[str, Any]:
            state: Mapping[str, Any] = describe(*given, **named)
            for entry in tree_iter(state):
                if isinstance(entry, ShardedBase):
                    entry.replica_id = _further(entry.replica_id, replicas * number)
            return state

        session.instances.set(owner, plain, "sharded_state_dict", described)
        for parameter in () if sharded else chunk.parameters():
            # megatron-core leaves out of the norm what is marked so.
            parameter.shared = True


def _further(replica: Any, by: int) -> Any:
    """Return the number of a replica on a later copy; tuples end with the data-parallel rank."""
    return (*replica[:-1], replica[-1] + by) if isinstance(replica, tuple) else replica + by


def sharded_over_copies(session: Session, optimizer: Any, pg: Any, placement: Placement) -> None:
    """Tell a distributed optimizer that its shards are those of buffers that all copies share.

    Args:
        session: the open one.
        optimizer: of all chunks of this rank, whose stages the same ranks hold.
        pg: the process groups.
        placement: with copies.
    """
    first = placement.position(placement.held[pg.pp.rank()][0])
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner.data_parallel_group = session.groups[f"pp.copies.dp_cp.{first}"]
        # Of the data-parallel ranks of one copy; state is gathered over the others too.
        inner.data_parallel_group_gloo = None


def wrapped_over_copies(
    session: Session,
    args: Namespace,
    config: Any,
    ddp_config: Any,
    model: Sequence[Any],
    pg: Any,
    placement: Placement,
) -> list[Any]:
    """Wrap each chunk for data parallelism over its copies, which begin with the same weights.

    Args:
        session: the open one.
        args: the arguments.
        config: megatron-core's configuration of the model.
        ddp_config: options of data parallelism.
        model: this rank's chunks.
        pg: the process groups.
        placement: with copies.

    Raises:
        SessionError: megatron-core's wrapper cannot be told its groups.
    """
    if "pg_collection" not in signature(DistributedDataParallel.__init__).parameters:
        raise SessionError(
            "--pipeline-schedule chimera: data parallelism of this megatron-core knows one group for all "
            "chunks; use megatron-core 0.15.3 or newer"
        )
    wrapped = []
    for chunk, stage in zip(model, placement.held[pg.pp.rank()]):
        at = placement.position(stage)
        groups = copy(pg)
        groups.dp = session.groups[f"pp.copies.dp.{at}"]
        groups.dp_cp = groups.intra_dp_cp = session.groups[f"pp.copies.dp_cp.{at}"]
        groups.expt_dp = groups.intra_expt_dp = groups.dp_cp
        (one,) = session.default(
            "wrap_ddp", args=args, config=config, ddp_config=ddp_config, model=[chunk], pg=groups
        )
        for parameter in one.parameters():
            dist.broadcast(parameter.data, group=groups.dp_cp, group_src=0)
        wrapped.append(one)
    return wrapped

"""Stages that turn arguments into model chunks wrapped for data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.hooks.marker import hookspec

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from mindspeed_core.run import BoundarySchema, ChunkPlace
    from mindspeed_core.session import Session

__all__ = [
    "boundary_schema",
    "build_ddp_config",
    "build_layer_spec",
    "build_model",
    "build_model_chunk",
    "build_mtp_spec",
    "build_transformer_config",
    "place_chunks",
    "wrap_ddp",
]


@hookspec
def build_transformer_config(session: Session, args: Namespace) -> TransformerConfig | Any:
    """Build the megatron-core configuration of the model.

    A feature's own options never travel on the configuration: they go into ``ModuleSpec.params``. A feature
    that needs a configuration built with other values than the final ones (heads that do not divide) replaces
    the stage or changes the result after its ``yield``.
    """


@hookspec(since="1.2")
def place_chunks(session: Session, args: Namespace, pp_rank: int, pp_size: int) -> Sequence[ChunkPlace] | Any:
    """Say where in the model the chunks of a pipeline rank are, in the order of the rank's chunks.

    Whoever replaces it fills ``pipeline-schedule``, and puts the layers of each place into
    ``config.pipeline_model_parallel_layout``. The default runs down the ranks with the first chunks of all,
    then with the second ones, as megatron-core's schedules do. Hosts take from it which chunks hold embedding
    and loss, and which rank has the losses of a step.

    Args:
        pp_rank: a pipeline rank, not always this process's.
        pp_size: pipeline ranks.
    """


@hookspec(added={"place": "1.2"})
def build_layer_spec(
    session: Session, args: Namespace, config: TransformerConfig, vp_stage: int | None, place: ChunkPlace
) -> TransformerBlockSubmodules | Any:
    """Build the module specification of one model chunk: all its layers and its final norm.

    Called once per chunk. The result is always the whole tree (``TransformerBlockSubmodules`` with one
    ``ModuleSpec`` per local layer and ``layer_norm``), never a single layer. Features change it with
    ``mindspeed_core.SpecEditor`` by role: ``qkv``, ``proj``, ``fc1``, ``fc2``, ``core_attention``,
    norms, ``mlp``, ``router``, ``experts``, ``shared_experts``, ….

    Args:
        place: of the chunk in the model.
    """


@hookspec
def build_mtp_spec(
    session: Session,
    args: Namespace,
    config: TransformerConfig,
    layer_spec: TransformerBlockSubmodules,
    vp_stage: int | None,
) -> MultiTokenPredictionBlockSubmodules | Any:
    """Build the specification of a chunk's multi-token prediction.

    Called by the default of `build_model_chunk`, for chunks that hold prediction layers. Its transformer
    layers copy the last one of ``layer_spec``, with what features put there. Edit them with `SpecEditor` too;
    the further roles are ``enorm``, ``hnorm`` and ``eh_proj``.
    """


@hookspec
def build_model_chunk(
    session: Session,
    args: Namespace,
    config: TransformerConfig,
    layer_spec: TransformerBlockSubmodules,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    global_stage: int,
    pg: ProcessGroupCollection,
) -> MegatronModule | Any:
    """Build one model chunk on this rank.

    Args:
        global_stage: position of the chunk in the whole model, see `place_chunks`.
    """


@hookspec
def build_model(
    session: Session, args: Namespace, config: TransformerConfig, pg: ProcessGroupCollection
) -> list[MegatronModule] | Any:
    """Build every model chunk of this rank, move it to its device and cast it to the training dtype.

    Change built instances after the ``yield`` of a wrapper, where each chunk carries ``chunk.vp_stage``:
    ``session.instances.set(owner, instance, attribute, value)`` records such a change and
    takes it back when the session closes.
    """


@hookspec
def boundary_schema(session: Session, args: Namespace, config: TransformerConfig) -> BoundarySchema | Any:
    """Describe the tensors that cross from one pipeline stage to the next, for one micro-batch.

    The default is one hidden state ``[s, b, h]`` with ``s`` divided by the sequence- and context-parallel
    degrees. A feature that sends another shape returns a changed schema; the schedule receives its shapes. A
    schedule whose micro-batches differ calls it once for each size, with that size in ``args.seq_length`` and
    ``args.micro_batch_size``.
    """


@hookspec
def build_ddp_config(session: Session, args: Namespace) -> DistributedDataParallelConfig | Any:
    """Build the configuration of megatron-core's data parallelism (buckets, overlap, padding)."""


@hookspec
def wrap_ddp(
    session: Session,
    args: Namespace,
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    model: list[MegatronModule],
    pg: ProcessGroupCollection,
) -> list[MegatronModule] | Any:
    """Wrap the chunks for data parallelism: gradient buffers, reduction, optional overlap.

    A feature that only changes options wraps `build_ddp_config`; this stage is for another wrapper.
    """

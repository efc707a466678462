"""Defaults of what a pipeline stage is given: the tensors of its neighbours, and the fields of a batch."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from mindspeed_core.feature import hookimpl
from mindspeed_core.run import BoundarySchema, TensorSpec

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@hookimpl(trylast=True)
def boundary_schema(args: Namespace, config: TransformerConfig) -> BoundarySchema:
    """Return one hidden state ``[s, b, h]`` per micro-batch, as megatron-core's schedules send it."""
    sequence = args.seq_length // config.context_parallel_size
    if config.sequence_parallel:
        sequence //= config.tensor_model_parallel_size
    shape = (sequence, args.micro_batch_size, config.hidden_size)
    return BoundarySchema((TensorSpec("hidden_states", shape, config.pipeline_dtype),))


@hookimpl(trylast=True)
def batch_fields(args: Namespace, pre_process: bool, post_process: bool) -> frozenset[str]:
    """Return tokens and positions for the embedding, labels and their mask for the loss."""
    fields: set[str] = set()
    # Layers that predict further tokens sit on the last stage and embed tokens themselves.
    if pre_process or (post_process and getattr(args, "mtp_num_layers", None)):
        fields |= {"tokens", "position_ids"}
    if post_process:
        fields |= {"labels", "loss_mask"}
    if args.create_attention_mask_in_dataloader:
        fields.add("attention_mask")
    return frozenset(fields)

"""Default of the tensors that cross from one pipeline stage to the next."""

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

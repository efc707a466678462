"""Closed forms of communication as predictions: the groups and operations they are about, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_tune.record import RankRecord

TENSOR = "TENSOR_MODEL_PARALLEL_GROUP"
PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"
DATA = "DATA_PARALLEL_GROUP_WITH_CP"
EXPERT = "EXPERT_MODEL_PARALLEL_GROUP"
EXPERT_DATA = "EXPERT_DATA_PARALLEL_GROUP"
EXPERT_BOTH = "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"
CONTEXT = "CONTEXT_PARALLEL_GROUP"
WORLD = "default_pg"

GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
EXCHANGE = "all_to_all_single"


@dataclass(frozen=True)
class Expected:
    """Prediction of a closed form for one operation in one group.

    Attributes:
        group: name of the group.
        operation: of the calls.
        dtype: of their tensors.
        calls: number of calls of a step.
        bytes: inputs of all of them together.
        form: how it is computed, for a reader.
    """

    group: str
    operation: str
    dtype: str
    calls: float
    bytes: float
    form: str


def tensor_sizes(record: RankRecord) -> tuple[float, float, str, float]:
    """Return positions of a micro-batch on this rank's context, hidden size, dtype and its bytes."""
    sizes = record.sizes
    positions = sizes["seq_length"] / record.layout.cp * sizes["micro_batch_size"]
    dtype = str(record.flags.get("params_dtype", "bfloat16"))
    return positions, sizes["hidden_size"], dtype, 4 if dtype == "float32" else 2

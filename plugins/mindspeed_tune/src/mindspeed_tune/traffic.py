"""Closed forms of communication: calls and input bytes of a step, per group, without running anything.

They cover megatron-core's own GPT: tensor parallelism with and without sequence parallelism, data parallelism
with and without the distributed optimizer, pipelines, experts dispatched by all-to-all, and sequences whose
keys every rank fetches. What they do not
cover is left out rather than guessed. A plan compares them with what was counted, in both directions: a form
that disagrees is an error of the form or of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mindspeed_tune.record import RankRecord, Stage

TENSOR = "TENSOR_MODEL_PARALLEL_GROUP"
PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"
DATA = "DATA_PARALLEL_GROUP_WITH_CP"
EXPERT = "EXPERT_MODEL_PARALLEL_GROUP"
EXPERT_DATA = "EXPERT_DATA_PARALLEL_GROUP"
EXPERT_BOTH = "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"
CONTEXT = "CONTEXT_PARALLEL_GROUP"

GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
EXCHANGE = "all_to_all_single"
_GATHERED = "kvallgather_cp_algo"


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


@dataclass(frozen=True)
class Compared:
    """A closed form beside what was counted."""

    expected: Expected
    calls: float
    bytes: float

    @property
    def difference(self) -> float:
        """Return the larger relative difference of calls and bytes."""
        pairs = ((self.calls, self.expected.calls), (self.bytes, self.expected.bytes))
        return max(abs(counted - said) / max(said, 1.0) for counted, said in pairs)


def expected(record: RankRecord) -> list[Expected]:
    """Return the closed forms that hold for a rank, in a fixed order."""
    return [one for one in _all(record) if one.calls]


def compare(
    record: RankRecord, counted: Mapping[tuple[int, str, str, str], tuple[float, float]]
) -> list[Compared]:
    """Return closed forms beside what was counted.

    Args:
        record: of the rank.
        counted: calls and bytes by group index, operation, dtype and phase.
    """
    found: dict[tuple[str, str, str], tuple[float, float]] = {}
    for (group, operation, dtype, phase), (calls, size) in counted.items():
        if phase == "setup":
            continue
        key = (record.groups[group].name, operation, dtype)
        before = found.get(key, (0.0, 0.0))
        found[key] = (before[0] + calls, before[1] + size)
    return [
        Compared(one, *found.get((one.group, one.operation, one.dtype), (0.0, 0.0)))
        for one in expected(record)
    ]


def _all(record: RankRecord) -> Iterator[Expected]:
    stage = record.stages[record.stage]
    if _plain(record):
        if record.layout.tp > 1 and record.flags.get("sequence_parallel"):
            yield from _sequence_parallel(record, stage)
        elif record.layout.tp > 1:
            yield from _tensor_parallel(record, stage)
    yield from _pipeline(record)
    yield from _data_parallel(record)
    if record.flags.get("context_parallel_algo") == _GATHERED:
        yield from _fetched_keys(record, stage)
    if record.flags.get("moe_token_dispatcher_type") == "alltoall":
        yield from _experts(record, stage)


def _plain(record: RankRecord) -> bool:
    """Return whether tensor-parallel calls are those of dense layers that are computed once."""
    flags = record.flags
    return not (
        flags.get("recompute_granularity") == "full"
        or flags.get("num_experts")
        or flags.get("multi_latent_attention")
        or any(one.predictions for one in record.stages)
        or set(record.features) & set(flags.get("changes_tensor_parallel", ()))
    )


def _sizes(record: RankRecord) -> tuple[float, float, str, float]:
    """Return positions of a micro-batch on this rank's context, hidden size, dtype and its bytes."""
    sizes = record.sizes
    positions = sizes["seq_length"] / record.layout.cp * sizes["micro_batch_size"]
    dtype = str(record.flags.get("params_dtype", "bfloat16"))
    return positions, sizes["hidden_size"], dtype, 4 if dtype == "float32" else 2


def _sequence_parallel(record: RankRecord, stage: Stage) -> Iterator[Expected]:
    positions, hidden, dtype, size = _sizes(record)
    m, tp = record.microbatches, record.layout.tp
    layers = sum(stage.layers.values())
    whole = positions * hidden * size
    ends = stage.embedding + 2 * stage.head
    gathers = m * (6 * layers + ends)
    scatters = m * (4 * layers + stage.embedding + stage.head)
    form = "m (6 L + embedding + 2 head) inputs of s b h / tp"
    yield Expected(TENSOR, GATHER, dtype, gathers, gathers * whole / tp, form)
    form = "m (4 L + embedding + head) inputs of s b h"
    yield Expected(TENSOR, SCATTER, dtype, scatters, scatters * whole, form)


def _tensor_parallel(record: RankRecord, stage: Stage) -> Iterator[Expected]:
    positions, hidden, dtype, size = _sizes(record)
    layers = sum(stage.layers.values())
    calls = record.microbatches * (4 * layers + stage.embedding + stage.head)
    form = "m (4 L + embedding + head) inputs of s b h"
    yield Expected(TENSOR, REDUCE, dtype, calls, calls * positions * hidden * size, form)


def _pipeline(record: RankRecord) -> Iterator[Expected]:
    layout, here = record.layout, record.stage
    if layout.pp == 1 or record.flags.get("changes_boundary"):
        return
    positions, hidden, dtype, size = _sizes(record)
    if record.flags.get("sequence_parallel"):
        positions /= layout.tp
    chunks = layout.vpp
    # Chunks lie round the ring of stages: only the ends of the model have nobody before or behind them.
    outward = chunks - (here == layout.pp - 1)
    backward = chunks - (here == 0)
    calls = record.microbatches * (outward + backward)
    for operation in ("isend", "irecv"):
        count = calls
        if operation == "irecv":
            count = record.microbatches * ((chunks - (here == 0)) + (chunks - (here == layout.pp - 1)))
        form = "m (chunks with a next one + chunks with one before) tensors of s b h"
        yield Expected(PIPELINE, operation, dtype, count, count * positions * hidden * size, form)


def _data_parallel(record: RankRecord) -> Iterator[Expected]:
    """Yield the exchange of gradients and parameters, of every buffer that has more than one rank."""
    sizes, flags = record.sizes, record.flags
    if not flags.get("distributed_data_parallel"):
        return
    for name, group, shards in (
        ("dense", DATA, record.layout.optimizer_shards),
        ("expert", EXPERT_DATA, record.layout.expert_dp),
    ):
        elements, buckets = sizes.get(f"{name}_elements", 0), sizes.get(f"{name}_buckets", 0)
        if not elements:
            continue
        gradient = 4 if flags.get("gradient_dtype") == "float32" else 2
        grad_dtype = str(flags.get("gradient_dtype"))
        if not flags.get("use_distributed_optimizer"):
            if shards > 1 or name == "dense":
                yield Expected(group, REDUCE, grad_dtype, buckets, elements * gradient, "4 bytes a parameter")
            continue
        param_dtype = str(flags.get("params_dtype", "bfloat16"))
        param = 4 if param_dtype == "float32" else 2
        form = f"{gradient} bytes a parameter, buffers padded"
        yield Expected(group, SCATTER, grad_dtype, buckets, elements * gradient, form)
        times = 1.0 if flags.get("overlap_param_gather") else sizes.get("optimizers", 1.0)
        form = f"{param} bytes a parameter / {shards} shards, buffers padded"
        if times > 1:
            form += f", once for each of {times:.0f} optimizers"
        yield Expected(group, GATHER, param_dtype, times * buckets, times * elements * param / shards, form)


def _experts(record: RankRecord, stage: Stage) -> Iterator[Expected]:
    layout, sizes = record.layout, record.sizes
    if layout.ep == 1 or not sizes.get("moe_layers"):
        return
    if record.flags.get("recompute_granularity") or record.flags.get("moe_capacity"):
        return
    positions, hidden, dtype, size = _sizes(record)
    if record.flags.get("sequence_parallel"):
        positions /= layout.tp
    passes = sizes["moe_layers"] * record.microbatches
    routed = positions * sizes["moe_router_topk"]
    rows, weights = 4 * passes * routed * hidden * size, 2 * passes * routed
    wide = {"fp32": ("float32", 4), "fp64": ("float64", 8)}.get(str(record.flags.get("moe_router_dtype")))
    if wide is None:
        form = "4 m L tensors of s b topk h, 2 m L of s b topk, tokens balanced"
        yield Expected(EXPERT, EXCHANGE, dtype, 6 * passes, rows + weights * size, form)
    else:
        form = "4 m L tensors of s b topk h, tokens balanced"
        yield Expected(EXPERT, EXCHANGE, dtype, 4 * passes, rows, form)
        form = "2 m L tensors of s b topk"
        yield Expected(EXPERT, EXCHANGE, wide[0], 2 * passes, weights * wide[1], form)
    counts = passes * sizes.get("num_moe_experts", 0) * 8
    yield Expected(EXPERT_BOTH, GATHER, "int64", passes if counts else 0, counts, "m L counts of all experts")


def _fetched_keys(record: RankRecord, stage: Stage) -> Iterator[Expected]:
    """Yield the exchange of keys and values, and of their gradients, among ranks with two chunks each."""
    layout, sizes, flags = record.layout, record.sizes, record.flags
    unlike = ("multi_latent_attention", "recompute_granularity", "reset_attention_mask")
    if layout.cp == 1 or any(flags.get(name) for name in unlike) or stage.predictions:
        return
    if (flags.get("sparse_mode") or 0) not in (0, 2):
        return
    if flags.get("attention_mask_type", "causal") != "causal" or flags.get("cp_fetch_head_groups", 1) > 1:
        return
    if flags.get("cp_layout", "auto") not in ("auto", "zigzag") or flags.get("cp_chunks_per_rank"):
        return
    _, _, dtype, size = _sizes(record)
    length, place = int(sizes["seq_length"]), layout.place(record.rank)["cp"]
    banded = (flags.get("use_flash_attn") or flags.get("use_fusion_attn_v2")) and not flags.get("sparse_mode")
    window = int(sizes.get("pre_tockens", length)) if banded else length
    owned = [_chunks(length, layout.cp, rank) for rank in range(layout.cp)]
    sent = sum(_fetched(queries, owned[place], window) for queries in owned)
    received = sum(_fetched(owned[place], keys, window) for keys in owned)
    heads = max(1.0, sizes.get("num_query_groups", sizes["num_attention_heads"]) / layout.tp)
    row = sizes["micro_batch_size"] * heads * 2 * sizes["kv_channels"]
    passes = record.microbatches * sum(stage.layers.values())
    wide = flags.get("cp_grad_comm_dtype") == "fp32"
    fetched, gradients = 2 * passes * sent * row * size, passes * received * row
    form = "2 m L fetches of the keys and values that others see of this rank's"
    if not wide:
        form += ", m L exchanges of gradients"
        yield Expected(CONTEXT, EXCHANGE, dtype, 3 * passes, fetched + gradients * size, form)
        return
    if dtype == "float32":
        yield Expected(CONTEXT, EXCHANGE, dtype, 3 * passes, fetched + gradients * 4, form)
        return
    yield Expected(CONTEXT, EXCHANGE, dtype, 2 * passes, fetched, form)
    form = "m L gradients of the keys and values that this rank sees"
    yield Expected(CONTEXT, EXCHANGE, "float32", passes, gradients * 4, form)


def _chunks(length: int, ranks: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Return the positions of a rank of context parallelism: a chunk from either end."""
    step = length // (2 * ranks)
    return tuple((chunk * step, (chunk + 1) * step) for chunk in (rank, 2 * ranks - 1 - rank))


def _fetched(queries: tuple[tuple[int, int], ...], keys: tuple[tuple[int, int], ...], window: int) -> int:
    """Return how many of the keys some of the queries see, causally and within a window."""
    seen = [(max(0, start - window), end) for start, end in queries]
    if seen[0][1] > seen[1][0]:
        seen = [(min(seen[0][0], seen[1][0]), seen[1][1])]
    return sum(max(0, min(high, end) - max(low, start)) for low, high in seen for start, end in keys)

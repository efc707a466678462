"""Closed forms of communication: calls and input bytes of a step, per group, without running anything.

They cover megatron-core's own GPT: tensor parallelism with and without sequence parallelism, data parallelism
with and without the distributed optimizer, pipelines, experts dispatched by all-to-all, and split sequences
(`mindspeed_tune.sequence_traffic`). What they do not cover is left out rather than guessed. A plan compares
them with what was counted, in both directions: a form that disagrees is an error of the form or of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mindspeed_tune.closed_form import (
    DATA,
    EXCHANGE,
    EXPERT,
    EXPERT_BOTH,
    EXPERT_DATA,
    GATHER,
    PIPELINE,
    REDUCE,
    SCATTER,
    TENSOR,
    WORLD,
    Expected,
    tensor_sizes,
)
from mindspeed_tune.record import RankRecord, Stage
from mindspeed_tune.sequence_traffic import split_sequences


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
    yield from split_sequences(record, stage)
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


def _sequence_parallel(record: RankRecord, stage: Stage) -> Iterator[Expected]:
    positions, hidden, dtype, size = tensor_sizes(record)
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
    positions, hidden, dtype, size = tensor_sizes(record)
    layers = sum(stage.layers.values())
    calls = record.microbatches * (4 * layers + stage.embedding + stage.head)
    total = calls * positions * hidden * size
    form = "m (4 L + embedding + head) inputs of s b h"
    if dtype == "float32" and stage.head:
        # The loss over a split vocabulary has the same dtype: largest, own and summed logits of a position.
        calls += record.microbatches * (2 if record.flags.get("cross_entropy_loss_fusion") else 3)
        total += record.microbatches * 3 * positions * 4
        form += ", and 3 m of s b for the loss"
    yield Expected(TENSOR, REDUCE, dtype, calls, total, form)


def _pipeline(record: RankRecord) -> Iterator[Expected]:
    layout, here = record.layout, record.stage
    if layout.pp == 1 or record.flags.get("changes_boundary"):
        return
    positions, hidden, dtype, size = tensor_sizes(record)
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
        # Two stages that do not batch their messages send those of the second one in the world's group.
        apart = layout.pp == 2 and not record.flags.get("batch_p2p_comm", True)
        group = WORLD if apart and (operation == "isend") == (here == 1) else PIPELINE
        yield Expected(group, operation, dtype, count, count * positions * hidden * size, form)


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
    positions, hidden, dtype, size = tensor_sizes(record)
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

"""Records of ranks whose every number is known: dense layers with sequence parallelism, 1F1B, ZeRO-1."""

from dataclasses import replace

from mindspeed_megatron.instruments.operations import matrix_key
from mindspeed_tune.closed_form import DATA, PIPELINE, TENSOR
from mindspeed_tune.record import Call, Group, LargeTensor, Peak, RankRecord, Run, Stage, Update
from mindspeed_tune.schedules import BACKWARD, FORWARD, in_flight, order

S, B, H, V = 4096, 1, 1024, 32000
PER_LAYER, EMBEDDED, WORKING = 900_000, 70_000, 5_000_000
PARAMETERS = 1_000_000


def stages(layout, layers=None):
    layers = layers or [4] * layout.pp
    last = layout.pp - 1
    return tuple(
        Stage(tuple(("dense",) * (count // layout.vpp) for _ in range(layout.vpp)), place == 0, place == last)
        for place, count in enumerate(layers)
    )


def record(layout, rank=0, microbatches=8, runs=((2, 1), (1, 1), (1, 2)), layers=None, **changes):
    """Return a rank's record with passes over ``(micro-batches, layers)``; 0 layers are all of them."""
    found = stages(layout, layers)
    groups = (
        Group(DATA, layout.group(rank, ("dp", "cp"))),
        Group(TENSOR, layout.group(rank, ("tp",))),
        Group(PIPELINE, layout.group(rank, ("pp",))),
    )
    made = RankRecord(
        rank=rank,
        layout=layout,
        stages=found,
        microbatches=microbatches,
        static={"parameters": 2.0 * PARAMETERS, "gradients": 4.0 * PARAMETERS, "main parameters": 4.0e5},
        runs=tuple(run(layout, found, rank, *one) for one in runs),
        update=update(layout),
        groups=groups,
        sizes={
            "seq_length": S,
            "micro_batch_size": B,
            "hidden_size": H,
            "num_attention_heads": 16,
            "global_batch_size": microbatches * layout.dp * B,
            "model_flops": 1e15,
            "dense_elements": PARAMETERS,
            "dense_buckets": 1,
        },
        flags={
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "distributed_data_parallel": True,
            "params_dtype": "bfloat16",
            "gradient_dtype": "float32",
        },
        features=("fused-rmsnorm",),
        cost={"cpu_seconds": 2.0, "peak_bytes": 4e8, "reserved_ratio": 1.02, "allocated_ratio": 1.01},
    )
    return replace(made, **changes)


def run(layout, found, rank, microbatches, layers=0):
    place = layout.place(rank)["pp"]
    stage = found[place]
    count = layers or sum(stage.layers.values())
    alive = in_flight(layout, place, microbatches)
    of_chunk = count // layout.vpp
    # The interleaved schedule keeps what a chunk has sent.
    message = S * B * H * 2 // layout.tp if layout.vpp > 1 else 0
    kept = alive * (of_chunk * PER_LAYER + EMBEDDED + message)
    peak = Peak(
        {
            "parameters": 2.0 * PARAMETERS,
            "gradients": 4.0 * PARAMETERS,
            "main parameters": 4.0e5,
            "activations": kept,
            "other": WORKING,
        },
        {"TransformerLayer": alive * of_chunk * PER_LAYER, "LanguageModelEmbedding": alive * EMBEDDED},
        (LargeTensor(3_000_000, "activations", "decoder.layers.0.mlp", "aten.mm", ("mlp.py:80 (forward)",)),),
        "aten.mm",
        ("mlp.py:80 (forward)",),
    )
    calls = []
    for direction, chunk, _ in order(layout, place, microbatches):
        calls += passes(layout, stage, rank, direction, count, chunk)
    calls.append(Call(0, "reduce_scatter_tensor", 4 * PARAMETERS, "float32", phase="gradients"))
    work = {
        f"{chunk} {direction}": {
            matrix_key("bfloat16", S, H, H): microbatches
            * of_chunk
            * (2 if direction == BACKWARD else 1)
            * 4.0,
            "bytes": microbatches * of_chunk * 1e7,
            "operators": microbatches * of_chunk * 30.0,
        }
        for chunk in range(layout.vpp)
        for direction in (FORWARD, BACKWARD)
    }
    only = {"dense": layers} if layers else {}
    return Run(microbatches, only, alive, peak, tuple(calls), work, tuple(order(layout, place, microbatches)))


def passes(layout, stage, rank, direction, layers, chunk=0):
    """Return the calls of one pass of a chunk."""
    place = layout.place(rank)
    shard, whole = S * B * H * 2 // layout.tp, S * B * H * 2
    last = layout.pp * layout.vpp - 1
    here = chunk * layout.pp + place["pp"]
    count = layers // layout.vpp
    ends = (here == last) + (direction == BACKWARD and here == 0)
    gathers = (2 if direction == FORWARD else 4) * count + ends
    scatters = 2 * count + (direction == FORWARD and here == 0) + (direction == BACKWARD and here == last)
    before = layout.rank({**place, "pp": (place["pp"] - 1) % layout.pp})
    after = layout.rank({**place, "pp": (place["pp"] + 1) % layout.pp})
    source, target = (before, after) if direction == FORWARD else (after, before)
    receives = here > 0 if direction == FORWARD else here < last
    sends = here < last if direction == FORWARD else here > 0
    gather = Call(1, "all_gather_into_tensor", shard, "bfloat16", phase=direction)
    scatter = Call(1, "reduce_scatter_tensor", whole, "bfloat16", phase=direction)
    calls = [gather] * gathers + [scatter] * scatters if layout.tp > 1 else []
    if receives:
        calls.insert(0, Call(2, "irecv", shard, "bfloat16", source, direction))
    if sends:
        calls.append(Call(2, "isend", shard, "bfloat16", target, direction))
    return calls


def update(layout):
    categories = {"parameters": 2.0 * PARAMETERS, "gradients": 4.0 * PARAMETERS, "main parameters": 4.0e5}
    return Update(
        Peak({**categories, "optimizer state": 8.0e5, "other": 2.0e5}),
        {**categories, "optimizer state": 8.0e5},
        (
            Call(
                0,
                "all_gather_into_tensor",
                2 * PARAMETERS // layout.optimizer_shards,
                "bfloat16",
                phase="update",
            ),
        ),
    )


def every_stage(layout, **options):
    """Return a record of one rank of each pipeline stage."""
    return [record(layout, layout.rank({"pp": place}), **options) for place in range(layout.pp)]

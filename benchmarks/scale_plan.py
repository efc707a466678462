"""Plan large launches, time the plans, and show that what is wrong with a launch is found.

CPU seconds and memory of the processes that run ranks; nothing else is timed, so that a busy machine changes
little. Every model is run on shapes alone: ``python benchmarks/scale_plan.py``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from machine import RESULTS, write

from mindspeed_tune.driver import Ranks, records_of
from mindspeed_tune.extrapolate import whole
from mindspeed_tune.hardware import read_hardware
from mindspeed_tune.launch_command import LaunchCommand, read_command
from mindspeed_tune.launch_plan import LaunchPlan, make_plan
from mindspeed_tune.layout import Layout
from mindspeed_tune.one_rank_groups import only_own_groups
from mindspeed_tune.record import Call, RankRecord

_LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 --mock-data "
    "--use-distributed-optimizer --train-iters 10 --lr 1e-4 --use-flash-attn --use-fused-rmsnorm "
    "--use-fused-swiglu --use-fused-rotary-pos-emb --sequence-parallel"
)
LAUNCHES = {
    "Llama-3 405B, 16,384 ranks": (
        "mindspeed-train --fake-world-size 16384 --num-layers 126 --decoder-first-pipeline-num-layers 7 "
        "--decoder-last-pipeline-num-layers 7 --hidden-size 16384 --ffn-hidden-size 53248 "
        "--num-attention-heads 128 --group-query-attention --num-query-groups 8 --seq-length 131072 "
        "--max-position-embeddings 131072 --vocab-size 128256 --tensor-model-parallel-size 8 "
        "--pipeline-model-parallel-size 16 --context-parallel-size 16 "
        "--context-parallel-algo kvallgather_cp_algo --micro-batch-size 1 "
        f"--global-batch-size 128 {_LLAMA}"
    ),
    "DeepSeek-V3, 2,048 ranks": (
        "mindspeed-train --fake-world-size 2048 --num-layers 61 --decoder-first-pipeline-num-layers 4 "
        "--decoder-last-pipeline-num-layers 1 --hidden-size 7168 --ffn-hidden-size 18432 "
        "--num-attention-heads 128 --kv-channels 128 --seq-length 4096 --max-position-embeddings 4096 "
        "--vocab-size 129280 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 "
        "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 "
        "--moe-ffn-hidden-size 2048 --moe-router-topk 8 --moe-shared-expert-intermediate-size 2048 "
        "--moe-layer-freq [0]*3+[1]*58 --moe-token-dispatcher-type alltoall --mtp-num-layers 1 "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 16 --expert-model-parallel-size 64 "
        "--micro-batch-size 1 --global-batch-size 4096 --position-embedding-type rope "
        "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
        "--attention-dropout 0 --hidden-dropout 0 --bf16 --mock-data --use-distributed-optimizer "
        "--train-iters 10 --lr 1e-4"
    ),
    "LLaMA2-70B, 1,024 ranks": (
        "mindspeed-train --fake-world-size 1024 --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 "
        "--num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 4096 "
        "--max-position-embeddings 4096 --vocab-size 32000 --tensor-model-parallel-size 8 "
        f"--pipeline-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 512 {_LLAMA}"
    ),
}
_SMALL = (
    "mindspeed-train --fake-world-size 16 --num-layers 16 --hidden-size 512 --num-attention-heads 8 "
    "--seq-length 1024 --vocab-size 8192 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
    f"--micro-batch-size 1 --global-batch-size 16 {_LLAMA}"
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="launches whose name contains one of these")
    parser.add_argument("--print-only", action="store_true", help="do not write benchmarks/results")
    chosen = parser.parse_args(arguments)
    names = [name for name in LAUNCHES if not chosen.only or any(part in name for part in chosen.only)]
    small = read_command(_SMALL.split())
    wanted: dict[str, Callable[[], Any]] = {
        "groups": lambda: groups_of_a_rank(131_072),
        **{name: partial(planned, read_command(LAUNCHES[name].split())) for name in names},
        "extrapolation": lambda: extrapolated(small),
        "injected": lambda: injected(small),
    }
    path = RESULTS / "scale_plan.json"
    found = json.loads(path.read_text(encoding="utf-8")) if chosen.only and path.exists() else {}
    found.pop("machine", None)
    for name, measure in wanted.items():
        found[name] = measure()
        print(json.dumps({name: found[name]}, indent=2), flush=True)
        if not chosen.print_only:
            # What is measured stays, should a later part be interrupted.
            write("scale_plan", found)


def planned(command: LaunchCommand) -> dict[str, Any]:
    """Plan a launch; return the cost of the plan and the main numbers of it."""
    with Ranks(command) as runner:
        records = records_of(runner)
    plan = make_plan(command.text, records)
    imports = children_seconds() - sum(record.cost["cpu_seconds"] for record in records)
    return {
        "kinds": len(plan.kinds),
        "ranks_run": len(records),
        "cpu_seconds": round(sum(record.cost["cpu_seconds"] for record in records), 1),
        "cpu_seconds_of_imports_and_earlier_plans": round(imports, 1),
        "peak_mib_of_a_rank": round(max(record.cost["peak_bytes"] for record in records) / 2**20),
        "peak_gib": {kind.kind.name: round(kind.fullest.exact / 2**30, 2) for kind in plan.kinds},
        "order_agrees": not plan.order.differences,
        "calls_compared": plan.order.compared,
        "largest_difference_of_closed_forms": max(
            (form.difference for kind in plan.kinds for form in kind.forms), default=0.0
        ),
        "incomplete": plan.incomplete,
    }


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def groups_of_a_rank(world_size: int) -> dict[str, Any]:
    """Time megatron-core's own building of the groups of single ranks of a large world.

    Each rank is a process of its own, forked from this one, in a world of fake groups.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - imports are not what is timed
    from megatron.core import parallel_state  # noqa: F401

    context = multiprocessing.get_context("fork")
    found = {}
    for rank in (0, world_size // 3, world_size - 1):
        queue = context.SimpleQueue()
        process = context.Process(target=_groups_of, args=(rank, world_size, queue))
        process.start()
        found[rank] = queue.get()
        process.join()
    return {
        "world_size": world_size,
        "cpu_seconds": max(seconds for seconds, _ in found.values()),
        "ranks": list(found),
        "sizes": found[0][1],
        "as_computed": all(sizes == _computed_sizes(rank, world_size) for rank, (_, sizes) in found.items()),
    }


_PARALLEL = {"tp": 8, "pp": 16, "cp": 16, "ep": 64, "etp": 1}


def _groups_of(rank: int, world_size: int, queue: Any) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state as state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = time.process_time()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    with only_own_groups(rank):
        state.initialize_model_parallel(
            _PARALLEL["tp"],
            _PARALLEL["pp"],
            context_parallel_size=_PARALLEL["cp"],
            expert_model_parallel_size=_PARALLEL["ep"],
            expert_tensor_parallel_size=_PARALLEL["etp"],
            create_gloo_process_groups=False,
        )
    seconds = round(time.process_time() - before, 2)
    sizes = {
        "tp": state.get_tensor_model_parallel_world_size(),
        "cp": state.get_context_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "dp-cp": state.get_data_parallel_world_size(with_context_parallel=True),
        "ep": state.get_expert_model_parallel_world_size(),
        "tp-pp": state.get_model_parallel_group().size(),
    }
    queue.put((seconds, sizes))


def _computed_sizes(rank: int, world_size: int) -> dict[str, int]:
    layout = Layout(world_size, **_PARALLEL)
    names = ("tp", "cp", "pp", "dp-cp", "ep", "tp-pp")
    return {name: layout.group(rank, name.split("-"), name == "ep").size for name in names}


def extrapolated(command: LaunchCommand) -> dict[str, Any]:
    """Compare extrapolated with exact numbers of every stage."""
    with Ranks(command) as runner, Ranks(command, exact_layers=True, exact_microbatches=True) as exact:
        pairs = list(zip(runner.run([0, 4, 8, 12]), exact.run([0, 4, 8, 12])))
    peaks = [_relative(whole(one).peak, whole(other).peak) for one, other in pairs]
    traffic = [
        _relative(
            {str(key): size for key, (_, size) in whole(one).traffic.items()},
            {str(key): size for key, (_, size) in whole(other).traffic.items()},
        )
        for one, other in pairs
    ]
    return {"peak": max(peaks), "traffic": max(traffic), "stages": len(pairs)}


def _relative(found: dict[str, float], expected: dict[str, float]) -> float:
    one, other = sum(found.values()), sum(expected.values())
    return abs(one - other) / other


def injected(command: LaunchCommand) -> dict[str, Any]:
    """Break a launch in three ways; return what the plan says of each."""
    with Ranks(command) as runner:
        records = records_of(runner)
    by_rank = {record.rank: record for record in records}
    partner = next(record for record in records if 0 < record.rank < 2)
    cases = {
        "swapped collective": {**by_rank, partner.rank: _changed(partner, _swapped)},
        "missing receive": {**by_rank, 4: _changed(by_rank[4], _without_receive)},
    }
    found = {name: _verdict(make_plan(command.text, ranks.values())) for name, ranks in cases.items()}
    hardware = read_hardware("ascend-910b")
    plan = make_plan(command.text, records)
    fullest = plan.fullest.fullest.exact
    small = replace(hardware, memory=fullest * 0.9, context=0.0, per_group=0.0)
    return {**found, "stage over capacity": _verdict(make_plan(command.text, records, small))}


def _verdict(plan: LaunchPlan) -> dict[str, Any]:
    return {"exit_status": 0 if plan.ok else 1, "problems": plan.problems}


def _changed(record: RankRecord, change: Any) -> RankRecord:
    first = record.runs[0]
    calls = list(first.calls)
    change(calls)
    return replace(record, runs=(replace(first, calls=tuple(calls)), *record.runs[1:]))


def _swapped(calls: list[Call]) -> None:
    for index, (one, other) in enumerate(pairwise(calls)):
        if one.group == other.group and one.operation != other.operation and one.peer is other.peer is None:
            calls[index], calls[index + 1] = other, one
            return


def _without_receive(calls: list[Call]) -> None:
    calls.remove(next(call for call in calls if call.operation == "irecv"))


if __name__ == "__main__":
    main()

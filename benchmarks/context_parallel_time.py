"""Two processes that share a sequence against one that has it whole: wall time of attention and of a GPT.

Sides take turns in the same processes, or in worlds one after another, and the best of all rounds counts:
whatever else the machine does can only add to it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from context_parallel_counts import members_of
from torch import Tensor
from trainings import TakeTurns
from turns import now, since

from mindspeed_cp.engine.attention import CallOptions, split_attention
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import GATHER, Grid, layout_of
from mindspeed_cp.options import CPOptions
from mindspeed_testing import run_world

LENGTH, HEADS, KEY_HEADS, WIDTH = 4096, 8, 2, 64
SIDES = {"ring": Grid(2), "Ulysses": Grid(1, 2), "fetched keys": Grid(2, method=GATHER)}


def attention_on_one_rank(rounds: int) -> dict[str, Any]:
    """Wall and CPU seconds of both passes: the whole sequence on one process, halves on two."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rule = (MaskRule(LENGTH),)
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, LENGTH, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    sides: dict[str, Callable[[], None]] = {"one process": lambda: _alone(whole) if rank == 0 else None}
    for name, grid in SIDES.items():
        sides[name] = _split(whole, grid, rule)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            dist.barrier()
            begin = now()
            side()
            dist.barrier()
            if turn:
                seconds[name].append(since(begin))
    torchs = _torchs_own(whole)
    dist.barrier()
    dist.destroy_process_group()
    best = {name: tuple(map(min, zip(*times))) for name, times in seconds.items()}
    return {"seconds": best, "torch": torchs}


def _alone(whole: list[Tensor]) -> None:
    inputs = [tensor.clone().requires_grad_() for tensor in whole]
    output = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    output.backward(output.detach())


def _split(whole: list[Tensor], grid: Grid, rule: tuple[MaskRule, ...]) -> Callable[[], None]:
    members = members_of(grid)
    position = torch.from_numpy(layout_of(grid, rule).positions(dist.get_rank()))
    mine = [tensor[:, :, position] for tensor in whole]

    def side() -> None:
        inputs = [tensor.clone().requires_grad_() for tensor in mine]
        output = split_attention(*inputs, rule, members, CPOptions(grid), CallOptions(WIDTH**-0.5))
        output.backward(output.detach())

    return side


def _torchs_own(whole: list[Tensor]) -> dict[str, Any]:
    """Seconds of torch's experimental context parallelism, or what it says."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    share = HEADS // KEY_HEADS
    inputs = [whole[0].clone(), *(tensor.repeat_interleave(share, 1) for tensor in whole[1:])]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {}
    for name, trains in (("forward and backward", True), ("forward", False)):
        begin = time.perf_counter()
        try:
            buffers = [tensor.clone().requires_grad_(trains) for tensor in inputs]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
                output = torch.nn.functional.scaled_dot_product_attention(*buffers, is_causal=True)
                if trains:
                    output.sum().backward()
            found[name] = {"seconds": time.perf_counter() - begin, "right": _is_right(output, inputs)}
        except Exception as error:
            found[name] = {"says": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return found


def _is_right(output: Tensor, inputs: list[Tensor]) -> bool:
    """Return whether the rows of this rank, in torch's zigzag, are those of one process."""
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    parts = expected.chunk(2 * dist.get_world_size(), dim=2)
    mine = torch.cat((parts[dist.get_rank()], parts[-1 - dist.get_rank()]), dim=2)
    return output.shape == mine.shape and torch.allclose(output, mine, atol=1e-4)


GPT = (
    "--platform cpu --num-layers 2 --hidden-size 256 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 2 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 511 "
    "--micro-batch-size 1 --global-batch-size 1 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --optimizer adam "
    "--lr 1e-3 --lr-decay-style constant --mock-data --num-workers 0 --eval-iters 0 "
    "--use-cpu-initialization --no-progress --log-interval 1"
).split()
TRAININGS = {
    "one process, megatron-core's attention": (1, ()),
    "one process, fused attention": (1, ("--use-flash-attn",)),
    "ring": (2, ("--context-parallel-size", "2")),
    "Ulysses": (2, ("--context-parallel-size", "2", "--context-parallel-algo", "ulysses_cp_algo")),
    "fetched keys": (2, ("--context-parallel-size", "2", "--context-parallel-algo", "kvallgather_cp_algo")),
}


def steps_on_one_rank(flags: list[str], steps: int) -> list[float]:
    """Wall seconds of every step but the first two."""
    from mindspeed_core.activation import prepare
    from mindspeed_train.loop import train

    begun: list[float] = []
    plugin = TakeTurns(lambda: begun.append(time.perf_counter()))
    with tempfile.TemporaryDirectory() as folder:
        given = [*flags, "--train-iters", str(steps), "--run-dir", folder]
        session = prepare(given, extra_plugins=[plugin], host="standalone")
        with (Path(folder) / "log").open("w") as log, redirect_stdout(log), session:
            train(session)
    return [later - earlier for earlier, later in pairwise(begun[1:])]


def wall_time(rounds: int = 8, steps: int = 7) -> dict[str, Any]:
    """Both measurements, with the speed-up of two processes over one."""
    everyone = run_world(attention_on_one_rank, 2, rounds, timeout=300)
    names = everyone[0]["seconds"]
    attention = {name: max(rank["seconds"][name][0] for rank in everyone) for name in names}
    cpu_seconds = {name: sum(rank["seconds"][name][1] for rank in everyone) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in TRAININGS}
    for _ in range(2):
        for name, (ranks, flags) in TRAININGS.items():
            times = run_world(steps_on_one_rank, ranks, [*GPT, *flags], steps, timeout=300)
            taken[name] += times[0]
    training = {name: min(times) for name, times in taken.items()}
    alone = training["one process, fused attention"]
    return {
        "attention": {
            "length": LENGTH,
            "seconds": attention,
            "cpu_seconds_of_all": cpu_seconds,
            "speedup": {name: attention["one process"] / value for name, value in attention.items()},
            "work": {name: value / cpu_seconds["one process"] for name, value in cpu_seconds.items()},
        },
        "training": {
            "seconds": training,
            "median_seconds": {name: statistics.median(times) for name, times in taken.items()},
            "speedup_over_fused_on_one_process": {name: alone / value for name, value in training.items()},
        },
        "torch_experimental": everyone[0]["torch"],
    }

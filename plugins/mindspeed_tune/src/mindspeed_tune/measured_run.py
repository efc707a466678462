"""Short runs of candidates inside one world: sessions open and close one after the other.

Every rank runs `run_candidates`; rank 0 writes a line into a file when a candidate begins and when it
ends, so that the parent knows which one was under way when a world died.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

BEGIN, END = "begin", "end"
HANGS = 124
"""Exit status of a rank whose candidate takes longer than its limit."""
_WARM_UP = 2
"""Steps that are not timed: the first one makes optimizer state, the second one is like all others."""


def run_candidates(
    queue: Sequence[tuple[str, Sequence[str], bool]],
    file: str,
    steps: int,
    limit: float,
    platform: str | None,
) -> int:
    """Train a few steps of every candidate of a queue; an error or a hang of one ends the world.

    Args:
        queue: name, arguments, and whether the peak of memory is measured too, in the order in which they
            are run; a name may come several times.
        file: that rank 0 writes lines of JSON into.
        steps: timed steps of each, behind those that warm up.
        limit: seconds after which a candidate counts as one that hangs.
        platform: what they train on; None for what their arguments say.

    Returns:
        How many candidates were run.
    """
    import torch

    torch.set_num_threads(1)
    first = os.environ["RANK"] == "0"
    with Path(file).open("a", encoding="utf-8") as written:

        def say(**line: Any) -> None:
            if first:
                written.write(json.dumps(line) + "\n")
                written.flush()

        for name, arguments, memory in queue:
            say(kind=BEGIN, name=name)
            watch = threading.Timer(limit, os._exit, (HANGS,))
            watch.daemon = True
            watch.start()
            try:
                found = _run(arguments, steps, platform, memory)
            finally:
                watch.cancel()
            say(kind=END, name=name, **found)
    return len(queue)


def _run(arguments: Sequence[str], steps: int, platform: str | None, memory: bool) -> dict[str, Any]:
    from mindspeed_core.activation import activate
    from mindspeed_core.discovery.host import DEFAULT_HOST
    from mindspeed_core.platforms.memory import TensorBytes
    from mindspeed_train.interface import setup, teardown

    session = activate(list(arguments), host=DEFAULT_HOST, platform=platform)
    peak: float | None = None
    try:
        # The CPU has no allocator that counts; following tensors costs time, which timed steps do not pay.
        counted = TensorBytes() if memory and session.platform.name == "cpu" else None
        with nullcontext() if counted is None else counted:
            run = setup(session)
            session.call("start_run", run=run)
            for _ in range(_WARM_UP):
                if counted is not None:
                    counted.reset_peak()
                session.platform.reset_peak_memory()
                _step(session, run)
        if memory:
            peak = _largest(session, run, counted.peak if counted else session.platform.peak_memory().bytes)
        times = [_timed(session, run) for _ in range(steps)]
        session.call("finish_run", run=run)
        del run
        teardown(session)
    finally:
        session.close()
        gc.collect()
    return {"times": times, "peak": peak, "load": os.getloadavg()[0]}


def _timed(session: Any, run: Any) -> float:
    """Return the seconds of a step of the slowest rank."""
    import torch.distributed as dist

    dist.barrier()
    session.platform.synchronize()
    began = time.perf_counter()
    _step(session, run)
    session.platform.synchronize()
    return _largest(session, run, time.perf_counter() - began)


def _step(session: Any, run: Any) -> None:
    from mindspeed_train.interface import batch_at

    samples = batch_at(run.args, run.consumed_train_samples).samples
    session.call("train_step", run=run)
    run.iteration += 1
    run.consumed_train_samples += samples


def _largest(session: Any, run: Any, value: float) -> float:
    """Return the largest of all ranks' values."""
    import torch
    import torch.distributed as dist

    device = session.platform.device(run.dist.local_rank)
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found.item())

"""Measure what a background save costs a training: its call beside one copy of the state, and later steps.

In one process and on one state ours and torch's `async_save` take turns, with plain steps and copies between
them, so that whatever the machine does meets all of them alike. Ranks begin a call together, as after a step.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

STEPS = 10
"""Steps after each save, from the first that may meet the writer."""
LONGEST = 1800.0


def measure(flags: Sequence[str], rounds: int, ranks: int) -> dict[str, float]:
    """Run the training on some ranks; medians over the rounds, of the slowest rank in each."""
    command = [sys.executable, "-W", "ignore", __file__, str(rounds), str(ranks), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def train_and_save(flags: Sequence[str], rounds: int, folder: str) -> list[dict[str, float]]:
    """Return one record per round, of this rank."""
    from mindspeed_core.activation import activate
    from mindspeed_train import loop

    # The ranks of a world are daemons, which have no children of their own in `multiprocessing`.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    own = ["--train-iters", "100000", "--save", f"{folder}/ours", "--async-save", "--keep-last-n", "1"]
    with activate([*flags, *own, "--run-dir", f"{folder}/run"], host="standalone") as session:
        run = loop.setup(session)
        # The first step allocates the optimizer's state, the first saves their plans and buffers.
        found = [_round(run, number, Path(folder)) for number in range(rounds + 1)]
        loop.teardown(session)
    return found[1:]


def _round(run: Any, number: int, folder: Path) -> dict[str, float]:
    import torch.distributed as dist
    from torch.distributed.checkpoint import async_save

    from mindspeed_train.checkpoint.save import Saver

    saver = run.session.state(Saver)
    record = {"plain_step": _steps(run, STEPS)}
    state = _state(run)
    record["state_mb"] = sum(tensor.nbytes for tensor in state.values()) / 1e6
    buffers = [tensor.clone() for tensor in state.values()]
    record["copy"] = statistics.median(_seconds(partial(_copy, buffers, state)) for _ in range(3))
    del buffers
    dist.barrier()
    record["call"] = _seconds(lambda: run.session.call("save_checkpoint", run=run, reason="interval"))
    record["step_after"] = _steps(run, STEPS)
    record["rest"] = _seconds(lambda: saver.poll(blocking=True))
    record["plain_step_again"] = _steps(run, STEPS)
    future: list[Any] = []
    where = folder / f"torch{number}"
    dist.barrier()
    record["torch_call"] = _seconds(lambda: future.append(async_save(state, checkpoint_id=where)))
    record["torch_step_after"] = _steps(run, STEPS)
    record["torch_rest"] = _seconds(lambda: future[0].result())
    record["foreground"] = _seconds(lambda: run.session.call("save_checkpoint", run=run, reason="exit"))
    return record


def _state(run: Any) -> dict[str, Any]:
    """Return weights and optimizer state of this rank, where they lie."""
    state = {}
    for index, chunk in enumerate(run.model):
        state.update({f"{index}.{name}": tensor.data for name, tensor in chunk.named_parameters()})
    for number, inner in enumerate(getattr(run.optimizer, "chained_optimizers", [run.optimizer])):
        parameters = [p for group in inner.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            held = {"param": parameter, **inner.optimizer.state[parameter]}
            tensors = {name: tensor.detach() for name, tensor in held.items() if getattr(tensor, "ndim", 0)}
            state.update({f"optimizer.{number}.{index}.{name}": t for name, t in tensors.items()})
    return state


def _copy(buffers: Sequence[Any], state: dict[str, Any]) -> None:
    for buffer, tensor in zip(buffers, state.values()):
        buffer.copy_(tensor)


def _steps(run: Any, count: int) -> float:
    """Train as the host's loop does; the mean of the steps."""
    from mindspeed_train.checkpoint.save import Saver

    began = time.perf_counter()
    for _ in range(count):
        run.session.state(Saver).poll(blocking=False)
        run.session.call("train_step", run=run)
        run.iteration += 1
    return (time.perf_counter() - began) / count


def _seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _summary(ranks: Sequence[Sequence[dict[str, float]]]) -> dict[str, float]:
    rounds = [{key: max(rank[key] for rank in each) for key in each[0]} for each in zip(*ranks)]

    def median(value: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(value(each) for each in rounds)

    def slower(key: str) -> float:
        return median(lambda each: 2 * each[key] / (each["plain_step"] + each["plain_step_again"]))

    return {
        "state_mb": median(lambda each: each["state_mb"]),
        "copy_seconds": median(lambda each: each["copy"]),
        "call_seconds": median(lambda each: each["call"]),
        "call_over_copy": median(lambda each: each["call"] / each["copy"]),
        "following_steps_over_plain": slower("step_after"),
        "foreground_save_seconds": median(lambda each: each["foreground"]),
        "torch_call_seconds": median(lambda each: each["torch_call"]),
        "torch_call_over_copy": median(lambda each: each["torch_call"] / each["copy"]),
        "torch_following_steps_over_plain": slower("torch_step_after"),
        "rounds": float(len(rounds)),
    }


def main() -> None:
    """Measure in this process; the last line is JSON."""
    from mindspeed_testing.worlds import run_world

    rounds, ranks, *flags = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        found = run_world(train_and_save, int(ranks), flags, int(rounds), folder, timeout=LONGEST)
    print(json.dumps(_summary(found)))


if __name__ == "__main__":
    main()

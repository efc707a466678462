"""The same training written by hand and run by the host, as parts that take turns.

Both build the same model from the same flags and make the same steps on the same samples.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from turns import Turns

from mindspeed_core.feature import hookimpl


class TakeTurns:
    """Outermost wrapper of the step: waits for its turn and reports how long the step took."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    @hookimpl(wrapper=True)
    def train_step(self) -> Any:
        self.wait()
        return (yield)


def by_host(turns: Turns, steps: int, given: Sequence[str]) -> None:
    """Train through the host; a turn is one whole iteration of its loop, logging included."""
    from mindspeed_core.activation import prepare
    from mindspeed_train.loop import train

    with tempfile.TemporaryDirectory() as folder:
        flags = [*given, "--train-iters", str(steps), "--run-dir", folder]
        session = prepare(flags, extra_plugins=[TakeTurns(turns.wait)], host="standalone")
        with (Path(folder) / "log").open("w") as log, redirect_stdout(log), session:
            train(session)
    turns.finish()


def by_hand(turns: Turns, steps: int, given: Sequence[str]) -> None:
    """Train with megatron-core's parts called directly: what one would write without a framework."""
    from mindspeed_core.activation import prepare
    from mindspeed_train.loop import setup, teardown

    # The session supplies the cpu platform and builds the parts; no stage is called after that.
    with (
        prepare([*given, "--train-iters", str(steps)], host="standalone") as session,
        tempfile.TemporaryFile("w") as log,
    ):
        run = setup(session)
        step = hand_written_step(run, run.data.train[0], log)
        for _ in range(steps):
            turns.wait()
            step()
        turns.finish()
        teardown(session)


def hand_written_step(run: Any, samples: Iterator[Any], log: TextIO) -> Callable[[], None]:
    """One iteration over parts that the host built, with no stage in it; the loss and norm go to ``log``."""
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, optimizer, scheduler, args = run.model[0], run.optimizer, run.scheduler, run.args
    schedule = get_forward_backward_func()
    finalize_of_host = run.config.finalize_model_grads_func

    def loss_function(mask: Any, output: Any) -> Any:
        total = (output.view(-1).float() * mask.view(-1)).sum()
        tokens = mask.sum().to(torch.int)
        return total, tokens, {"lm loss": torch.stack([total.detach().clone(), tokens])}

    def forward(data: Any, chunk: Any) -> Any:
        sample = next(data)
        output = chunk(sample["tokens"], sample["position_ids"], None, labels=sample["labels"])
        return output, lambda out: loss_function(sample["loss_mask"], out)

    def step() -> None:
        run.config.finalize_model_grads_func = finalize_model_grads
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = schedule(
            forward_step_func=forward,
            data_iterator=[samples],
            model=[model],
            num_microbatches=args.num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        scheduler.step(increment=args.global_batch_size)
        total, count = torch.stack([report["lm loss"] for report in reports]).sum(dim=0).tolist()
        print(total / count, float(norm), file=log, flush=True)
        run.config.finalize_model_grads_func = finalize_of_host

    return step

"""The same small training written by hand and run by the host, as parts that take turns.

Both build the same model from the same flags and make the same steps on the same samples; the host's part can
carry features that wrap stages and do nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from turns import TakeTurns, Turns

from mindspeed_core.feature import Feature, Flag, hookimpl


def noop_features() -> list[type[Feature]]:
    """Twenty features, each wrapping four stages (five of them per micro-batch or step) and doing nothing."""
    made: list[type[Feature]] = []
    per_step = ("train_step", "optimizer_step", "log_step", "finalize_gradients")
    per_microbatch = ("forward_step", "get_batch", "compute_loss")
    per_run = ("build_layer_spec", "build_model", "build_optimizer", "build_transformer_config")
    for index in range(20):
        stages = (
            per_step[index % len(per_step)],
            per_microbatch[index % len(per_microbatch)],
            per_microbatch[(index + 1) % len(per_microbatch)],
            per_run[index % len(per_run)],
        )
        flag = Flag(f"--noop-{index}", help="Does nothing.")
        body: dict[str, Any] = {stage: hookimpl(wrapper=True)(pass_through) for stage in stages}
        body.update(name=f"noop-{index}", family="benchmark", summary="Does nothing.", flags=(flag,))
        made.append(type(f"Noop{index}", (Feature,), body))
    return made


def pass_through(self: Any) -> Any:
    """A wrapper that does nothing."""
    return (yield)


def by_host(pipe: Connection, steps: int, given: Sequence[str], features: int = 0) -> None:
    """Train through the host; a turn is one whole iteration of its loop, logging included."""
    from mindspeed_core.activation import prepare
    from mindspeed_core.hosts.standalone.loop import train
    from mindspeed_core.registry import Registry

    turns = Turns(pipe)
    installed = Registry.discover()
    declarations = noop_features()[:features]
    registry = installed if not features else Registry.of(declarations)
    flags = [*given, "--train-iters", str(steps), *(f"--noop-{index}" for index in range(features))]
    extra = [TakeTurns(turns.wait)]
    with tempfile.TemporaryDirectory() as folder:
        session = prepare([*flags, "--run-dir", folder], registry=registry, extra_plugins=extra)
        with (Path(folder) / "log").open("w") as log, redirect_stdout(log), session:
            train(session)
    turns.wait()


def by_hand(pipe: Connection, steps: int, given: Sequence[str]) -> None:
    """Train with megatron-core's parts called directly: what one would write without a framework."""
    from mindspeed_core.activation import prepare

    turns = Turns(pipe)
    # The session only supplies the cpu platform; no stage is called after the parts are built.
    with prepare([*given, "--train-iters", str(steps)]) as session:
        import torch
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from mindspeed_core.hosts.standalone.loop import setup, teardown

        run = setup(session)
        model, optimizer, scheduler = run.model[0], run.optimizer, run.scheduler
        iterator = run.data.train[0]
        run.config.finalize_model_grads_func = finalize_model_grads
        schedule = get_forward_backward_func()
        args = run.args

        def loss_function(mask: Any, output: Any) -> Any:
            total = (output.view(-1).float() * mask.view(-1)).sum()
            tokens = mask.sum().to(torch.int)
            return total, tokens, {"lm loss": torch.stack([total.detach().clone(), tokens])}

        def forward(data: Any, chunk: Any) -> Any:
            sample = next(data)
            output = chunk(sample["tokens"], sample["position_ids"], None, labels=sample["labels"])
            return output, lambda out: loss_function(sample["loss_mask"], out)

        with tempfile.TemporaryFile("w") as log:
            for step in range(steps):
                turns.wait()
                model.zero_grad_buffer()
                optimizer.zero_grad()
                reports = schedule(
                    forward_step_func=forward,
                    data_iterator=[iterator],
                    model=[model],
                    num_microbatches=args.num_microbatches,
                    seq_length=args.seq_length,
                    micro_batch_size=args.micro_batch_size,
                    forward_only=False,
                )
                _, norm, _ = optimizer.step()
                scheduler.step(increment=args.global_batch_size)
                total, count = torch.stack([report["lm loss"] for report in reports]).sum(dim=0).tolist()
                print(step, total / count, float(norm), file=log)
        turns.wait()
        teardown(session)

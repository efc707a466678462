"""Short trainings with one optimizer or another, on the process group of a world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_core.activation import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.saved_state import saved_state
from mindspeed_train import loop

STEPS = 8


@contextmanager
def opened(*flags: str, probes: Sequence[object] = (), registry: Any = None) -> Iterator[Any]:
    """A run that is set up."""
    line = training_flags(flags, STEPS, registry)
    session = activate(line, platform="cpu", host="standalone", extra_plugins=probes, registry=registry)
    try:
        with session:
            run = loop.setup(session)
            yield run
    finally:
        destroy_megatron_state()


def train(run: Any, steps: int) -> list[tuple[Any, ...]]:
    """Train, and return the report of each step."""
    found = []
    for _ in range(steps):
        result = run.session.call("train_step", run=run)
        run.iteration += 1
        run.consumed_train_samples += run.args.global_batch_size
        found.append((result.losses["lm loss"], result.grad_norm))
    run.complete_parameters()
    return found


def save(run: Any) -> None:
    """A checkpoint."""
    run.complete_parameters()
    run.session.call("save_checkpoint", run=run, reason="end")


def optimizer_tensors(run: Any) -> dict[str, torch.Tensor]:
    """Main parameters and moments as a checkpoint holds them; empty on other ranks than the first."""
    found = saved_state(run, with_optimizer=True)
    return {} if found is None else {key: value.clone() for key, value in found.optimizer.tensors.items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Keys of tensors that are not the same to the bit."""
    return sorted(key for key in one.keys() | other.keys() if not _same(one.get(key), other.get(key)))


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def inner(run: Any) -> list[Any]:
    """The inner optimizers."""
    return [part.optimizer for part in getattr(run.optimizer, "chained_optimizers", [run.optimizer])]

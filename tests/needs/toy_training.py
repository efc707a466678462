"""Short trainings inside a world: several sessions, one after another, on one process group.

Worlds of these tests run functions that open sessions with this module, train a step or two and bring home
plain data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_core.activation import activate
from mindspeed_core.run import Run, StepResult
from mindspeed_core.session import Session
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing.canonical import (
    CanonicalState,
    canonical_gradients,
    canonical_parameters,
    load_canonical,
)
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")


@contextmanager
def opened(*flags: str, probes: Sequence[object] = (), mode: str = "train") -> Iterator[Session]:
    """An open session; the process group outlives it, as it does in a framework that owns it."""
    session = activate(
        training_flags(flags, 10), platform="cpu", mode=mode, extra_plugins=probes, host="standalone"
    )
    try:
        with session:
            yield session
            if dist.is_initialized():
                dist.barrier()
    finally:
        destroy_megatron_state()


@contextmanager
def training(
    *flags: str, initial: CanonicalState | None = None, probes: Sequence[object] = (), mode: str = "train"
) -> Iterator[Run]:
    """A run that is set up, from given weights where they are given."""
    with opened(*flags, probes=probes, mode=mode) as session:
        run = loop.setup(session)
        if initial is not None:
            load_canonical(run, initial)
        yield run


def step(run: Run) -> StepResult:
    """One training step, counted as the loop counts it."""
    result: StepResult = run.session.call("train_step", run=run)
    run.iteration += 1
    run.consumed_train_samples += run.args.global_batch_size
    return result


def losses(run: Run, steps: int = 2) -> list[float]:
    """The loss of each of some steps."""
    return [step(run).losses["lm loss"] for _ in range(steps)]


def logged(run: Run) -> dict[str, Any]:
    """One step and what is logged of it."""
    result = step(run)
    numbers: dict[str, Any] = run.session.call("log_step", run=run, result=result)
    return numbers


def everywhere(state: CanonicalState | None) -> CanonicalState:
    """What rank 0 has, on every rank."""
    box: list[Any] = [state]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    found: CanonicalState = box[0]
    return found


def parameters(run: Run) -> CanonicalState:
    """The unsharded parameters, on every rank."""
    return everywhere(canonical_parameters(run))


def gradients(run: Run) -> CanonicalState:
    """The unsharded gradients of the last step, on every rank."""
    return everywhere(canonical_gradients(run))


def distance(one: CanonicalState, other: CanonicalState) -> float:
    """Largest absolute difference of two states with the same tensors."""
    assert one.tensors.keys() == other.tensors.keys()
    return max(float((tensor - other.tensors[key]).abs().max()) for key, tensor in one.tensors.items())


def same_on_all_ranks(value: float) -> bool:
    """Whether every rank has this number."""
    tensor = torch.tensor([value, -value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bool(tensor[0] == -tensor[1])

"""Short trainings with adapters in a world: what they train, keep, save and load."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_core.activation import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_megatron.unwrap import unwrap
from mindspeed_models.features.lora_proofs import ALL, PLAIN
from mindspeed_testing.canonical import CanonicalState, canonical_parameters, load_canonical
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

BASE = PLAIN
LORA = (*PLAIN, *ALL)
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
STEPS = 12
State = dict[str, torch.Tensor]


class Course:
    """A run that is set up."""

    def __init__(self, run: Any, said: list[str]) -> None:
        self.run = run
        self.said = said

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Train, and return loss and norm of each step."""
        found = []
        for _ in range(steps):
            result = self.run.session.call("train_step", run=self.run)
            self.run.iteration += 1
            self.run.consumed_train_samples += self.run.args.global_batch_size
            found.append((float(result.losses["lm loss"]), float(result.grad_norm)))
        self.run.complete_parameters()
        return found

    def save(self) -> None:
        """Write a checkpoint."""
        self.run.complete_parameters()
        self.run.session.call("save_checkpoint", run=self.run, reason="end")

    def parameters(self) -> CanonicalState:
        """Return the whole parameters, on every rank."""
        box: list[Any] = [canonical_parameters(self.run)]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def trained(self) -> tuple[int, int, int]:
        """Return the elements that train, those of gradient buffers, and those of first moments."""
        chunks = self.run.model
        trained = sum(p.numel() for chunk in chunks for p in chunk.parameters() if p.requires_grad)
        buffers = sum(
            p.main_grad.numel()
            for chunk in chunks
            for p in unwrap(chunk).parameters()
            if getattr(p, "main_grad", None) is not None
        )
        chained = getattr(self.run.optimizer, "chained_optimizers", [self.run.optimizer])
        moments = sum(
            state["exp_avg"].numel()
            for part in chained
            if part.optimizer is not None
            for state in part.optimizer.state.values()
            if "exp_avg" in state
        )
        return trained, buffers, moments


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def course(*flags: str, initial: CanonicalState | None = None, mode: str = "train") -> Iterator[Course]:
    """Set a run up, from given weights where they are given, and tear it down behind."""
    said, logger = _Warnings(), logging.getLogger("mindspeed_core")
    logger.addHandler(said)
    try:
        with activate(training_flags(flags, STEPS), platform="cpu", host="standalone", mode=mode) as session:
            run = loop.setup(session)
            if initial is not None:
                load_canonical(run, initial, may_lack=["*.lora_A", "*.lora_B"])
            yield Course(run, said.lines)
    finally:
        logger.removeHandler(said)
        destroy_megatron_state()


def is_adapter(key: str) -> bool:
    """Return whether a key is an adapter's."""
    return key.endswith((".lora_A", ".lora_B"))


def distance(one: CanonicalState, other: CanonicalState, *, adapters: bool) -> float:
    """Return the largest difference of adapters, or of everything else."""
    keys = [key for key in one.tensors if is_adapter(key) == adapters]
    assert keys
    return max(float((one.tensors[key] - other.tensors[key]).abs().max()) for key in keys)


def refusal(*flags: str, steps: int = 0) -> str:
    """Return what a run with these flags says, that does not come about."""
    try:
        with course(*flags) as found:
            found.train(steps)
    except Exception as error:
        return str(error)
    return ""

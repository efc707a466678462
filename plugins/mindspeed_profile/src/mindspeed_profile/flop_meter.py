"""TFLOP/s of a run: by the model's formula, and by the operators of one step that is counted.

Every rank counts its own operators in the second step of the process, and the counts are added up; the step
that is counted takes longer and is left out of the time. Operators are counted over whole score matrices,
and as often as they run, by redundant ranks too; the formula counts the half of the scores that a causal mask
leaves.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_core.runtime.metrics import Report
from mindspeed_megatron.flops import count_run, uncounted
from mindspeed_megatron.instruments.device_peak import peak_tflops
from mindspeed_megatron.instruments.operations import operations
from mindspeed_megatron.instruments.passes import BACKWARD, FORWARD, RECOMPUTED, current_pass
from mindspeed_megatron.instruments.work_counter import WorkCounter
from mindspeed_megatron.padding import StepLengths
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.run import Run

logger = logging.getLogger(__name__)

UPDATE = "update"
COUNTED_STEP = 2
"""Of a process, from 1: the first one prepares kernels and buffers."""


@dataclass
class Measured:
    """A step under way; ``tokens`` are those of all ranks, 0 where nobody says."""

    tokens: int = 0


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of a step, or a sample of it, over all ranks."""

    forward: float
    backward: float
    recomputed: float
    update: float

    @property
    def needed(self) -> float:
        """Return those without the ones that were run again."""
        return self.forward + self.backward

    @property
    def executed(self) -> float:
        """Return all but those of the update."""
        return self.needed + self.recomputed


class FlopMeter:
    """Measures a run from its start on."""

    def __init__(self, run: Run, *, by_formula: bool, counted: bool) -> None:
        """Find the peak of the device; on CPU it is measured.

        Raises:
            UserError: operators are to be counted, and the model is compiled.
        """
        if counted:
            _refuse_compiled(run)
        self._platform = run.session.platform
        self._peak, source = peak_tflops(run)
        if self._peak is None and run.dist.rank == 0:
            logger.warning("--op-cal-tflops: %s; MFU and HFU are not logged", source)
        self._by_formula, self._counts = by_formula, counted
        missing = uncounted(run.config) if by_formula else ""
        if missing:
            self._by_formula = False
            if run.dist.rank == 0:
                logger.warning("--op-cal-tflops: %s by the formula", missing)
        self._steps_begun = 0
        self._updating = False
        self._seconds = self._samples = 0.0
        self._steps = 0
        self._own: dict[str, float] | None = None
        self._operations: Operations | None = None
        self._of_samples = 0.0
        self._told = False

    @contextmanager
    def step(self, run: Run) -> Iterator[Measured]:
        """Measure one training step, which is the body."""
        self._steps_begun += 1
        counting = self._counts and self._steps_begun == COUNTED_STEP
        counter = WorkCounter(self._key) if counting else None
        measured, before = Measured(), run.consumed_train_samples
        self._platform.synchronize()
        started = time.perf_counter()
        with nullcontext() if counter is None else counter:
            yield measured
        self._platform.synchronize()
        seconds = time.perf_counter() - started
        length = getattr(run.args, "seq_length", None) or 0
        samples = measured.tokens / length if measured.tokens and length else 0.0
        filled_up = run.session.state(StepLengths).work
        if filled_up is not None and filled_up.samples is not None:
            # So many whole ones cost as much.
            samples = filled_up.samples
        samples = samples or float(run.consumed_train_samples - before)
        if counter is not None:
            self._own = {key: operations(work) for key, work in counter.work.items()}
            self._of_samples = samples
            return
        self._seconds += seconds
        self._samples += samples
        self._steps += 1

    @contextmanager
    def update(self) -> Iterator[None]:
        """Count the body's operators as those of the update."""
        before, self._updating = self._updating, True
        try:
            yield
        finally:
            self._updating = before

    def figures(self, run: Run) -> dict[str, Any]:
        """Return the figures of the steps since the last call; collective over all ranks.

        Keys: ``model_tflops_per_device`` and ``mfu`` by the formula, ``counted_tflops_per_device`` without
        what is run again, ``executed_tflops_per_device`` and ``hfu`` with it; once ``operations``, the
        counts.
        Without the formula ``mfu`` is of what was counted.
        """
        if self._own is not None:
            self._operations, self._own = total(all_gather_values(self._own)), None
        found: dict[str, Any] = {}
        devices = run.dist.world_size
        if self._steps and self._seconds:
            scale = 1 / self._seconds / devices / 1e12
            model = self._formula(run)
            if model is not None and self._samples:
                found["model_tflops_per_device"] = model * self._samples * scale
                self._share(found, "mfu", "model_tflops_per_device")
            counted = self._operations
            if counted is not None:
                times = (
                    self._samples / self._of_samples if self._of_samples and self._samples else self._steps
                )
                found["counted_tflops_per_device"] = counted.needed * times * scale
                found["executed_tflops_per_device"] = counted.executed * times * scale
                if "mfu" not in found:
                    self._share(found, "mfu", "counted_tflops_per_device")
                self._share(found, "hfu", "executed_tflops_per_device")
        self._seconds = self._samples = 0.0
        self._steps = 0
        if self._operations is not None and not self._told:
            self._told = True
            found["operations"] = _report(self._operations, self._of_samples)
        return found

    def _key(self) -> str:
        return UPDATE if self._updating else current_pass()

    def _formula(self, run: Run) -> float | None:
        """Return the operations of a sequence by the formula, once its length and vocabulary are known."""
        length = getattr(run.args, "seq_length", None)
        rows = getattr(run.args, "padded_vocab_size", None) or getattr(
            unwrap(run.model[0]), "vocab_size", None
        )
        if not self._by_formula or not length or not rows:
            return None
        return count_run(run, length, rows).model

    def _share(self, found: dict[str, Any], name: str, of: str) -> None:
        if self._peak:
            found[name] = found[of] / self._peak


def total(ranks: Any) -> Operations:
    """Add up the operations of all ranks."""
    sums = {key: sum(rank.get(key, 0.0) for rank in ranks) for key in (FORWARD, BACKWARD, RECOMPUTED, UPDATE)}
    return Operations(sums[FORWARD], sums[BACKWARD], sums[RECOMPUTED], sums[UPDATE])


def _report(found: Operations, samples: float) -> Report:
    values = {
        "samples": samples,
        FORWARD: found.forward,
        BACKWARD: found.backward,
        RECOMPUTED: found.recomputed,
        UPDATE: found.update,
    }
    line = (
        f"operations of the counted step, all ranks: forward {found.forward:.6g}, backward "
        f"{found.backward:.6g}, run again {found.recomputed:.6g}, update {found.update:.6g} (whole score "
        "matrices, where a kernel does not say that it leaves out masked parts)"
    )
    return Report(values, [line])


def _refuse_compiled(run: Run) -> None:
    # Not loaded, nothing is compiled; loading it takes seconds.
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    for chunk in run.model:
        for name, module in chunk.named_modules():
            if isinstance(module, compiled):
                raise UserError(
                    f"--op-cal-tflops: {name or 'the model'} is compiled, and operators of compiled regions "
                    "are not seen one by one; add --flops-mode model"
                )

"""Declaration of where the time of a step goes. No torch."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Feature, Flag, hookimpl
from mindspeed_profile.features.proofs import PP2, TP2, unchanged

_FLAG = "--log-step-breakdown"


class StepBreakdown(Feature):
    """The time of a step by what it was spent on, in the log."""

    name = "step-breakdown"
    family = "profile"
    summary = "Log how long a step reads data, computes, waits in each group and updates"
    level = 2
    stability = "prototype"
    flags = (Flag(_FLAG, help="Log where the time of a step goes: data, compute, waiting by group, update."),)
    docs = "mindspeed_profile:docs/step-breakdown.md"
    modes = ("train",)
    affects_checkpoint = False
    fake_tensors = True
    deterministic = True
    verify = unchanged((_FLAG,), {"tp2-sp": TP2, "pp2": PP2})

    _clock: Any = None

    @hookimpl(wrapper=True)
    def train_step(self, session: Any, run: Any) -> Generator[None, Any, Any]:
        """Divide the time of the step."""
        if self._clock is None:
            from mindspeed_profile.step_clock import StepClock

            self._clock = StepClock(session.platform)
        with self._clock.step(session, run):
            return (yield)

    @hookimpl(wrapper=True)
    def get_batch(self) -> Generator[None, Any, Any]:
        """Tell the time of the data apart."""
        from mindspeed_profile.step_clock import DATA

        with self._part(DATA):
            return (yield)

    @hookimpl(wrapper=True)
    def finalize_gradients(self) -> Generator[None, Any, Any]:
        """Tell the end of the gradients apart."""
        from mindspeed_profile.step_clock import GRADIENTS

        with self._part(GRADIENTS):
            return (yield)

    @hookimpl(wrapper=True)
    def optimizer_step(self) -> Generator[None, Any, Any]:
        """Tell the update apart."""
        from mindspeed_profile.step_clock import OPTIMIZER

        with self._part(OPTIMIZER):
            return (yield)

    @hookimpl(wrapper=True)
    def log_step(self) -> Generator[None, Any, Any]:
        """Add the times."""
        numbers = yield
        return numbers if self._clock is None else {**numbers, "step_breakdown_ms": self._clock.report()}

    def _part(self, name: str) -> Any:
        from contextlib import nullcontext

        # Batches are also made before a run starts, for evaluation and by callers.
        return nullcontext() if self._clock is None else self._clock.part(name)

"""Declaration of the bytes that a step communicates. No torch."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Feature, Flag, Resume, Scenario, hookimpl

_FLAG = "--log-comm-bytes"
_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_PP2 = ("--pipeline-model-parallel-size", "2")
_ZERO = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


class CommunicationBytes(Feature):
    """Calls and bytes of a step by group and operation, in the log."""

    name = "comm-bytes"
    family = "profile"
    summary = "Log calls and bytes of communication per step, by process group and operation"
    level = 2
    flags = (Flag(_FLAG, help="Log calls and bytes of communication by process group."),)
    docs = "mindspeed_profile:docs/communication.md"
    modes = ("train",)
    affects_checkpoint = False
    fake_tensors = True
    deterministic = True
    verify = (
        Scenario("tp2-sp", flags=(*_TP2, _FLAG), baseline=_TP2, world_size=2, tolerance=0.0),
        Scenario("pp2", flags=(*_PP2, _FLAG), baseline=_PP2, world_size=2, tolerance=0.0),
        Scenario("zero1-overlap", flags=(*_ZERO, _FLAG), baseline=_ZERO, world_size=2, tolerance=0.0),
        Scenario(
            "resume", flags=(*_TP2, _FLAG), world_size=2, resume=Resume(flags=(*_PP2, _FLAG), world_size=2)
        ),
    )

    _count: Any = None

    @hookimpl(wrapper=True)
    def train_step(self, session: Any) -> Generator[None, Any, Any]:
        """Count what the step communicates."""
        if self._count is None:
            from mindspeed_profile.communication_count import CommunicationCount

            self._count = CommunicationCount()
        with self._count.step(session):
            return (yield)

    @hookimpl(wrapper=True)
    def log_step(self) -> Generator[None, Any, Any]:
        """Add the counts."""
        numbers = yield
        return numbers if self._count is None else {**numbers, "communication": self._count.report()}

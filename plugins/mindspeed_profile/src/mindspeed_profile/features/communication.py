"""Declaration of the bytes that a step communicates. No torch."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Feature, Flag, hookimpl
from mindspeed_profile.features.proofs import PP2, TP2, unchanged

_FLAG = "--log-comm-bytes"
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
    verify = unchanged((_FLAG,), {"tp2-sp": TP2, "pp2": PP2, "zero1-overlap": _ZERO})

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

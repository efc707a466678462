"""Declarations of the package: flags, what they need, their proofs. No torch."""

from __future__ import annotations

from mindspeed_core.feature import HookApi, Slot
from mindspeed_profile.features.breakdown import StepBreakdown
from mindspeed_profile.features.communication import CommunicationBytes
from mindspeed_profile.features.dump import DataDump
from mindspeed_profile.features.memory import MemoryHistory, MemoryLog
from mindspeed_profile.features.profile import Profile
from mindspeed_profile.features.throughput import CountedThroughput

__all__ = ["DECLARATIONS", "Profile"]

DECLARATIONS = (
    HookApi("1.3"),
    Slot("profiler", "who records a trace of the run"),
    Profile,
    MemoryHistory,
    MemoryLog,
    CommunicationBytes,
    StepBreakdown,
    CountedThroughput,
    DataDump,
)

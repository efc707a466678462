"""Whether pipeline stages have to tell each other shapes; no torch."""

from __future__ import annotations

from typing import Any


def stages_tell_shapes(session: Any, args: Any) -> bool:
    """Return whether the schedule is megatron-core's interleaved one, which knows one shape by itself."""
    interleaved = (getattr(args, "virtual_pipeline_model_parallel_size", None) or 1) > 1
    return interleaved and "pipeline-schedule" not in session.plan.slots

"""The profiler of a device: torch's own on CPU and CUDA, torch_npu's on NPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from mindspeed_core.runtime.earlier_files import move_aside
from mindspeed_profile.options import ProfileOptions
from mindspeed_profile.recorder import Profiler

logger = logging.getLogger(__name__)


def trace_name(rank: int, first: int, end: int) -> str:
    """Return the file name of a rank's trace; chrome://tracing, Perfetto and TensorBoard read it."""
    return f"rank{rank:05d}_steps{first}-{end}.pt.trace.json.gz"


def torch_profiler(
    options: ProfileOptions, device: str, rank: int, warmup: int, first: int, end: int
) -> Profiler:
    """Build torch's profiler; it writes ``options.path / trace_name(...)`` when it stops.

    Args:
        options: the flags.
        device: ``"cpu"`` or ``"cuda"``.
        rank: of this process.
        warmup: steps before the recorded ones.
        first: first recorded step.
        end: first step that is no longer recorded.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CUDA] if device == "cuda" else []
    if options.cpu or not activities:
        activities.append(ProfilerActivity.CPU)

    def write(profiler: Any) -> None:
        # A run may end within the chosen steps; one that fails within its first step has part of that.
        reached = max(first + profiler.step_num - warmup, first + 1)
        path = options.path / trace_name(rank, first, reached)
        try:
            # Another run's, of the same steps.
            move_aside(options.path, [path.name])
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            logger.warning("--profile-save-path %s: %s; training goes on without it", path, error)
            return
        logger.info("rank %d: trace of steps %d to %d in %s", rank, first, reached - 1, path)

    return profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=warmup, active=end - first, repeat=1),
        on_trace_ready=write,
        record_shapes=options.shapes,
        profile_memory=options.memory,
        with_stack=options.stack,
        with_modules=options.level >= 2,
    )


def npu_profiler(options: ProfileOptions, rank: int, warmup: int, first: int, end: int) -> Profiler:
    """Build torch_npu's profiler; it writes a folder per rank under ``options.path`` when it stops.

    Arguments are those of `torch_profiler`.
    """
    from torch_npu import profiler as npu

    activities = [npu.ProfilerActivity.NPU]
    if options.cpu:
        activities.append(npu.ProfilerActivity.CPU)
    # At level 0 the device collects no core metrics, and asking for them is an error.
    metrics = npu.AiCMetrics.PipeUtilization if options.level else npu.AiCMetrics.AiCoreNone
    result: Profiler = npu.profile(
        activities=activities,
        schedule=npu.schedule(wait=0, warmup=warmup, active=end - first, repeat=1),
        on_trace_ready=npu.tensorboard_trace_handler(str(options.path), worker_name=f"rank{rank:05d}"),
        record_shapes=options.shapes,
        profile_memory=options.memory,
        with_stack=options.stack,
        with_modules=options.level >= 2,
        experimental_config=npu._ExperimentalConfig(
            profiler_level=getattr(npu.ProfilerLevel, f"Level{options.level}"), aic_metrics=metrics
        ),
    )
    return result


def make_profiler(
    options: ProfileOptions, device: str, rank: int, warmup: int, first: int, end: int
) -> Profiler:
    """Build the profiler of ``device``, and make the folder it writes to."""
    Path(options.path).mkdir(parents=True, exist_ok=True)
    if device == "npu":
        return npu_profiler(options, rank, warmup, first, end)
    return torch_profiler(options, device, rank, warmup, first, end)

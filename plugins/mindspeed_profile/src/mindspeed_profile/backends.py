"""The profiler of a device: torch's own on CPU and CUDA, torch_npu's on NPU."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path
from typing import Any

from mindspeed_megatron.earlier_files import move_aside
from mindspeed_profile.options import ALL_RANKS, ASYNC, OFF, ProfileOptions
from mindspeed_profile.recorder import Profiler

logger = logging.getLogger(__name__)
_LISTED_RANKS = 256


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


def npu_profiler(
    options: ProfileOptions, rank: int, warmup: int, first: int, end: int, analysis: str
) -> Profiler:
    """Build torch_npu's profiler; it writes a folder per rank under ``options.path`` when it stops.

    Args:
        options: as for `torch_profiler`, like the other arguments.
        rank: of this process.
        warmup: steps before the recorded ones.
        first: first recorded step.
        end: first step that is no longer recorded.
        analysis: ``sync`` analyses in the training, ``async`` beside it, ``off`` leaves it for later.
    """
    from torch_npu import profiler as npu

    activities = [npu.ProfilerActivity.NPU]
    if options.cpu:
        activities.append(npu.ProfilerActivity.CPU)
    # At level 0 the device collects no core metrics, and asking for them is an error.
    usual = "PipeUtilization" if options.level else "none"
    metrics = options.metrics or usual
    # What torch_npu calls text holds the trace that Perfetto reads.
    exports = sorted({"Db" if one == "db" else "Text" for one in options.exports})
    chosen = {"export_type": [getattr(npu.ExportType, one) for one in exports]} if exports else {}
    result: Profiler = npu.profile(
        activities=activities,
        schedule=npu.schedule(wait=0, warmup=warmup, active=end - first, repeat=1),
        on_trace_ready=npu.tensorboard_trace_handler(
            str(options.path),
            worker_name=f"rank{rank:05d}",
            analyse_flag=analysis != OFF,
            async_mode=analysis == ASYNC,
        ),
        record_shapes=options.shapes,
        profile_memory=options.memory,
        with_stack=options.stack,
        with_modules=options.level >= 2,
        experimental_config=npu._ExperimentalConfig(
            profiler_level=getattr(npu.ProfilerLevel, f"Level{options.level}"),
            aic_metrics=getattr(npu.AiCMetrics, "AiCoreNone" if metrics == "none" else metrics),
            **chosen,
        ),
    )
    return result


def later_analysis(path: Path) -> str:
    """Return the command that analyses an NPU's records after the training."""
    code = f"from torch_npu.profiler.profiler import analyse; analyse({str(path.absolute())!r})"
    return f"python3 -c {shlex.quote(code)}"


def make_profiler(
    options: ProfileOptions, device: str, rank: int, world_size: int, warmup: int, first: int, end: int
) -> Profiler:
    """Build the profiler of ``device``, and make the folder it writes to."""
    Path(options.path).mkdir(parents=True, exist_ok=True)
    if device != "npu":
        return torch_profiler(options, device, rank, warmup, first, end)
    analysis = options.analysed(world_size)
    if analysis == OFF and rank == (0 if ALL_RANKS in options.ranks else min(options.ranks)):
        logger.warning(
            "the records of --profile are not analysed in the training; afterwards: %s",
            later_analysis(options.path),
        )
    made = npu_profiler(options, rank, warmup, first, end, analysis)
    for name, ranks in _process_groups().items():
        # Communicators of HCCL have no names of their own.
        made.add_metadata_json(f"process group {name}", json.dumps(ranks))  # type: ignore[attr-defined]
    return made


def _process_groups() -> dict[str, list[int] | str]:
    """Return the ranks of every process group of this rank by its description, long lists in words.

    torch_npu leaves out texts of more than 4096 characters.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return {}
    from torch.distributed.distributed_c10d import _world

    found: dict[str, list[int] | str] = {}
    for group in list(_world.pg_map):
        ranks = dist.get_process_group_ranks(group)
        few = len(ranks) <= _LISTED_RANKS
        found[str(group.group_desc)] = ranks if few else f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    return found

"""The profiling flags as data, and their checks. No torch: planning reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


LEVELS = ("level0", "level1", "level2")
ALL_RANKS = -1
EXPORTS = ("text", "db", "perfetto")
METRICS = (
    "PipeUtilization",
    "ArithmeticUtilization",
    "Memory",
    "MemoryL0",
    "MemoryUB",
    "ResourceConflictRatio",
    "L2Cache",
    "MemoryAccess",
    "none",
)
ANALYSES = SYNC, ASYNC, OFF = ("sync", "async", "off")
ANALYSED_RANKS = 8
"""Above so many recorded ranks nothing is analysed in the training unless it is asked for."""


@dataclass(frozen=True)
class ProfileOptions:
    """The flags of one run.

    Attributes:
        start: first recorded step, counted from 0 over the whole training, resumed runs included.
        end: first step that is no longer recorded.
        level: 0 device work, 1 also the stages of a step, 2 also the modules.
        cpu: record host operators.
        stack: record the Python stack of each operator.
        memory: record allocations.
        shapes: record the shapes of each operator's inputs.
        path: folder of the traces.
        ranks: recorded ranks; -1 among them stands for all.
        exports: forms in which an NPU's record is written, see `EXPORTS`; empty for its default.
        metrics: which metrics an NPU's cores collect, see `METRICS`; empty for the level's default.
        analysis: when torch_npu analyses what it recorded, see `ANALYSES`; empty to let the ranks decide.
    """

    start: int
    end: int
    level: int
    cpu: bool
    stack: bool
    memory: bool
    shapes: bool
    path: Path
    ranks: tuple[int, ...]
    exports: tuple[str, ...] = ()
    metrics: str = ""
    analysis: str = ""

    @classmethod
    def of(cls, args: Any) -> ProfileOptions:
        """Read the parsed arguments."""
        from pathlib import Path

        return cls(
            start=args.profile_step_start,
            end=args.profile_step_end,
            level=LEVELS.index(args.profile_level),
            cpu=args.profile_with_cpu,
            stack=args.profile_with_stack,
            memory=args.profile_with_memory,
            shapes=args.profile_record_shapes,
            path=Path(args.profile_save_path),
            ranks=tuple(args.profile_ranks),
            exports=tuple(args.profile_export_type or ()),
            metrics=args.profile_aic_metrics or "",
            analysis=args.profile_analyse or "",
        )

    def records(self, rank: int) -> bool:
        """Return whether a rank is recorded."""
        return is_chosen(self.ranks, rank)

    def outside(self, world_size: int) -> tuple[int, ...]:
        """Return the ranks that do not exist in a world of this size."""
        return tuple(rank for rank in self.ranks if rank >= world_size)

    def analysed(self, world_size: int) -> str:
        """Return when the record is analysed: as the flag says, else at once unless many ranks record."""
        if self.analysis:
            return self.analysis
        recorded = world_size if ALL_RANKS in self.ranks else len(set(self.ranks))
        return OFF if recorded > ANALYSED_RANKS else SYNC


def is_chosen(ranks: Sequence[int], rank: int) -> bool:
    """Return whether a rank is among those that ``--profile-ranks`` names."""
    return ALL_RANKS in ranks or rank in ranks


def problems(options: ProfileOptions) -> Sequence[str]:
    """Return what is wrong with the flags, one sentence each."""
    found = []
    if options.start < 0:
        found.append(f"--profile-step-start {options.start}: steps are counted from 0")
    if options.end <= options.start:
        found.append(
            f"--profile-step-end {options.end} must be above --profile-step-start {options.start}: the steps "
            "from start up to, but not including, end are recorded"
        )
    of_operators = {"memory": (options.memory, "allocations"), "stack": (options.stack, "stacks")}
    for name, (wanted, records) in of_operators.items():
        if wanted and not options.cpu:
            found.append(
                f"--profile-with-{name} needs --profile-with-cpu: {records} belong to host operators; add "
                f"--profile-with-cpu or drop --profile-with-{name}"
            )
    if options.metrics not in ("", "none") and not options.level:
        found.append(
            f"--profile-aic-metrics {options.metrics}: at level0 the cores of a device collect no metrics; "
            "add --profile-level level1"
        )
    found += rank_problems(options.ranks)
    return found


def rank_problems(ranks: Sequence[int]) -> list[str]:
    """Return what is wrong with ``--profile-ranks``."""
    if not ranks:
        return ["--profile-ranks names no rank; name some, or -1 for all"]
    negative = [rank for rank in ranks if rank < ALL_RANKS]
    return [f"--profile-ranks {negative[0]}: a rank is 0 or above, or -1 for all"] if negative else []

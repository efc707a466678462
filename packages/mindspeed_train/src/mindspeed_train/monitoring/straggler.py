"""Stragglers: forward times compared between ranks that do the same work.

Collectives make the steps of all ranks equally long, so what tells ranks apart is the forward pass with
its batch, before gradients meet. It is compared within a pipeline stage, since stages differ in their work;
ranks of one tensor-parallel group wait for each other inside the forward pass and share its time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.runtime.gather import all_gather_values

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.run import Run


class ForwardClock:
    """Accumulates the forward time of this rank; used as a context around each forward pass."""

    def __init__(self, platform: Platform) -> None:
        """Start at zero, waiting for ``platform``'s device at both ends of a measurement."""
        self.platform = platform
        self.seconds, self.passes = 0.0, 0
        self._started = 0.0

    def __enter__(self) -> None:
        """Start measuring."""
        self.platform.synchronize()
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        """Stop measuring."""
        self.platform.synchronize()
        self.seconds += time.perf_counter() - self._started
        self.passes += 1

    def take(self) -> float:
        """Return the mean milliseconds of a forward pass since the last call; 0 when there was none."""
        mean = self.seconds * 1e3 / self.passes if self.passes else 0.0
        self.seconds, self.passes = 0.0, 0
        return mean


def straggler_report(run: Run, clock: ForwardClock) -> dict[str, Any]:
    """Compare the ranks; the same on every rank. Collective."""
    return compare_ranks(all_gather_values((run.pg.pp.rank(), clock.take())), run.args.straggler_minmax_count)


def compare_ranks(ranks: Sequence[tuple[int, float]], count: int) -> dict[str, Any]:
    """Name the slowest and fastest ranks.

    Args:
        ranks: pipeline stage and milliseconds of a forward pass, by rank.
        count: ranks named at each end.

    Returns:
        ``straggler_rank``, ``straggler_ratio`` (its time over the median of its stage) and
        ``straggler_ranks``: the ratios of the named ranks, slowest first.
    """
    stages: dict[int, list[float]] = {}
    for stage, milliseconds in ranks:
        stages.setdefault(stage, []).append(milliseconds)
    # Of two ranks the faster one is the measure: the mean of both would hide half of the difference.
    usual = {stage: statistics.median_low(times) for stage, times in stages.items()}
    ratios = {
        rank: milliseconds / usual[stage] if usual[stage] else 1.0
        for rank, (stage, milliseconds) in enumerate(ranks)
    }
    order = sorted(ratios, key=lambda rank: -ratios[rank])
    named = order if len(order) <= 2 * count else [*order[:count], *order[-count:]]
    return {
        "straggler_rank": order[0],
        "straggler_ratio": ratios[order[0]],
        "straggler_ranks": {str(rank): ratios[rank] for rank in named},
    }


def straggler_line(report: Mapping[str, Any]) -> str:
    """Format the report as one line."""
    ratios = ", ".join(f"rank {rank} {ratio:.2f}" for rank, ratio in report["straggler_ranks"].items())
    return f"forward time over the median of the stage: {ratios} (slowest: rank {report['straggler_rank']})"

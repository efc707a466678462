"""The counters of attention among the metrics of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mindspeed_cp.engine.counters import counting

if TYPE_CHECKING:
    from mindspeed_core.run import Run


@contextmanager
def counted_step(run: Run) -> Iterator[None]:
    """Count inside, and record the sums of all layers and micro-batches of the step.

    Sent bytes are the mean of all ranks, in MiB; scores the mean and the most of any rank, for each query
    head. With recomputed layers forward counts twice.
    """
    with counting() as counters:
        yield
    for kind, size in sorted(counters.sent.items()):
        run.metrics.add(f"cp {kind} MiB", size / 2**20, "mean")
    run.metrics.add("cp scores", float(counters.pairs), "mean")
    run.metrics.add("cp scores of the busiest rank", float(counters.pairs), "max")

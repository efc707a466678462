"""Measurement of the second step of a run, the first one that has all of the optimizer's state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.earlier_files import move_aside
from mindspeed_megatron.instruments.held_tensors import ACTIVATIONS, OTHER
from mindspeed_megatron.instruments.host_buffers import mark_host_buffers
from mindspeed_megatron.instruments.phases import FORWARD_BACKWARD, UPDATE
from mindspeed_megatron.instruments.storage import StorageTracker
from mindspeed_megatron.spared_failures import SparedFailures
from mindspeed_memory.report.formulas import kept_bytes
from mindspeed_memory.report.table import report_of, text_of
from mindspeed_memory.report.timeline import Timeline, picture, readable

if TYPE_CHECKING:
    from mindspeed_core.run import Run

SECOND = 2


class Recorder:
    """Follows storages from the building of the model to the end of the second step."""

    def __init__(self, session: Any) -> None:
        """Start; closing the session stops it at the latest."""
        self._session = session
        self._failures: SparedFailures = session.state(SparedFailures)
        self._storage: StorageTracker | None = StorageTracker(session.platform.device_type, whole_graphs=True)
        self._steps = 0
        self._storage.start()
        mark_host_buffers(session.platform, session.instances, self._storage)
        session.at_close(self._stop)

    @contextmanager
    def step(self, run: Run, folder: str) -> Iterator[None]:
        """Follow a step; the second one is reported.

        Args:
            run: the run in progress.
            folder: receives the files.
        """
        storage, self._steps = self._storage, self._steps + 1
        if storage is None:
            yield
            return
        if self._steps < SECOND:
            yield
            storage.mark_run(run)
            return
        timeline, platform = Timeline(), self._session.platform
        with ExitStack() as recording:
            storage.phase(FORWARD_BACKWARD)
            recording.enter_context(storage.watched_by(timeline))
            platform.record_memory()
            recording.callback(platform.record_memory, 0)
            timeline.mark(FORWARD_BACKWARD)
            self._timeline = timeline
            yield
            storage.mark_run(run)
            storage.end_phase()
            if not platform.dry_run:
                with self._failures.spare(f"--memory-report {folder}"):
                    name = f"rank-{run.dist.rank}"
                    # Those of an earlier run.
                    move_aside(Path(folder), [f"{name}.{suffix}" for suffix in ("pickle", "json", "svg")])
                    platform.memory_snapshot(Path(folder) / f"{name}.pickle")
        self._report(run, storage, timeline, Path(folder))
        self._stop()

    def begin_update(self, run: Run) -> None:
        """End forward and backward of the step that is reported."""
        if self._storage is not None and self._steps == SECOND:
            self._storage.mark_run(run)
            self._storage.phase(UPDATE)
            self._timeline.mark(UPDATE)

    def _report(self, run: Run, storage: StorageTracker, timeline: Timeline, folder: Path) -> None:
        with storage.paused():
            phases = [phase for phase in storage.report() if phase.name in (FORWARD_BACKWARD, UPDATE)]
            kept = {kind: size for kind, size in storage.now().items() if kind not in (ACTIVATIONS, OTHER)}
            known = self._session.registry.features
            active = [known[name].cls for name in self._session.plan.names if name in known]
            report = report_of(run.dist.rank, phases, kept, kept_bytes(run, active))
            peaks = all_gather_values(max(phase.peak for phase in phases))
            if not self._session.platform.dry_run:
                with self._failures.spare(f"--memory-report {folder}"):
                    stem = folder / f"rank-{run.dist.rank}"
                    stem.with_suffix(".json").write_text(
                        json.dumps(report, indent=1) + "\n", encoding="utf-8"
                    )
                    title = f"rank {run.dist.rank}: bytes on the device in the second step"
                    stem.with_suffix(".svg").write_text(picture(timeline, kept, title), encoding="utf-8")
        if run.dist.rank == 0:
            largest = max(range(len(peaks)), key=peaks.__getitem__)
            self._failures.say(text_of(report))
            self._failures.say(f"  largest peak of all ranks: {readable(peaks[largest])}, rank {largest}")

    def _stop(self) -> None:
        if self._storage is not None:
            self._storage.stop()
            self._storage = None

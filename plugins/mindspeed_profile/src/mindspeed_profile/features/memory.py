"""Declarations about device memory: a history of allocations, and figures in the log. No torch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.errors import ArgumentError
from mindspeed_core.feature import Conflict, Feature, Flag, hookimpl
from mindspeed_profile.features.profile import PROFILE_RANKS
from mindspeed_profile.features.proofs import TP2, unchanged
from mindspeed_profile.options import is_chosen, rank_problems

_HISTORY, _PATH = "--record-memory-history", "--memory-snapshot-path"
_INTERVAL, _USED = "--log-memory-interval", "--log-device-memory-used"
_HISTORY_PROOF = (_HISTORY, _PATH, "runs/memory-proof/snapshot.pickle", "--profile-ranks", "-1")
_LOG_PROOF = (_INTERVAL, "1", _USED)


class MemoryHistory(Feature):
    """History of allocations of chosen ranks, for https://pytorch.org/memory_viz."""

    name = "memory-history"
    family = "profile"
    summary = "Record allocations with their Python stacks, from the model on, in a file"
    level = 2
    flags = (
        Flag(_HISTORY, help="Record allocations of the ranks of --profile-ranks, from the model on."),
        Flag(
            _PATH,
            type=str,
            default="snapshot.pickle",
            per_rank=True,
            help="File of the history; the rank joins its name.",
        ),
        PROFILE_RANKS,
    )
    conflicts = (
        Conflict(
            feature="memory-report",
            reason="--memory-report records allocations too, and there is one record; give one of them",
        ),
    )
    docs = "mindspeed_profile:docs/memory.md"
    modes = ("train",)
    affects_checkpoint = False
    fake_tensors = True
    deterministic = True
    verify = unchanged(_HISTORY_PROOF, {"single": (), "tp2-sp": TP2})

    _history: Any = None

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Check the ranks and the file."""
        found = rank_problems(args.profile_ranks)
        if not args.memory_snapshot_path or args.memory_snapshot_path.endswith("/"):
            found.append(f"{_PATH} {args.memory_snapshot_path!r} names no file; name one, snapshot.pickle")
        return found

    @hookimpl(wrapper=True)
    def validate_arguments(self) -> Generator[None, Any, Any]:
        """Check the ranks against the world."""
        args = yield
        outside = [rank for rank in args.profile_ranks if rank >= args.world_size]
        if outside:
            raise ArgumentError(
                "--profile-ranks",
                " ".join(map(str, args.profile_ranks)),
                f"rank {outside[0]} is outside the world of {args.world_size}",
                f"name ranks from 0 to {args.world_size - 1}, or -1 for all",
            )
        return args

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Record from the first parameter on."""
        rank = session.place_in_world()[0]
        wanted = is_chosen(args.profile_ranks, rank) and not session.platform.dry_run
        if self._history is None and wanted:
            from mindspeed_profile.memory_history import MemoryHistoryFile

            self._history = MemoryHistoryFile(session.platform, args.memory_snapshot_path, rank)
            session.at_close(self._stop)
        return (yield)

    @hookimpl(wrapper=True)
    def train_step(self) -> Generator[None, Any, Any]:
        """Write the history when a step fails, for want of memory for instance."""
        try:
            return (yield)
        except BaseException:
            if self._history is not None:
                self._history.write()
            raise

    @hookimpl(wrapper=True)
    def log_step(self) -> Generator[None, Any, Any]:
        """Write the history now and then, so that a run that is killed leaves one."""
        if self._history is not None:
            self._history.write_now_and_then()
        return (yield)

    @hookimpl(wrapper=True)
    def finish_run(self) -> Generator[None, Any, Any]:
        """Write the history and end the recording."""
        try:
            self._stop()
        finally:
            result = yield
        return result

    def _stop(self) -> None:
        """Write the history and end the recording, once."""
        history, self._history = self._history, None
        if history is not None:
            history.close()


class MemoryLog(Feature):
    """Figures of device memory in the log."""

    name = "memory-log"
    family = "profile"
    summary = "Log the memory that tensors take on the fullest and the emptiest rank"
    level = 2
    flags = (
        Flag(_INTERVAL, type=int, help="Steps between figures of memory; a multiple of --log-interval."),
        Flag(_USED, help="Log the memory of the device that is in use, by whatever process, too."),
    )
    docs = "mindspeed_profile:docs/memory.md"
    modes = ("train",)
    affects_checkpoint = False
    fake_tensors = True
    deterministic = True
    verify = unchanged(_LOG_PROOF, {"single": (), "tp2-sp": TP2})

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether one of the flags asks for figures."""
        return args.log_memory_interval is not None or args.log_device_memory_used

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Check the interval against that of the log."""
        interval, log = args.log_memory_interval, getattr(args, "log_interval", None) or 1
        if interval is None:
            return ()
        if interval < 1:
            return (f"{_INTERVAL} {interval}: a number of steps is 1 or above",)
        if interval % log:
            return (
                f"{_INTERVAL} {interval} must be a multiple of --log-interval {log}: figures go with a "
                "logged step",
            )
        return ()

    @hookimpl(wrapper=True)
    def log_step(self, session: Any, run: Any) -> Generator[None, Any, Any]:
        """Add the figures of all ranks."""
        interval = run.args.log_memory_interval or 1
        if run.iteration % interval == 0 and not session.platform.dry_run:
            from mindspeed_profile.memory_figures import record_figures

            record_figures(session.platform, run.metrics, device=run.args.log_device_memory_used)
        return (yield)

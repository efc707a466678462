"""The log of a run: lines and a live line for people, ``metrics.jsonl``, its status and charts for programs.

Whatever of it fails is told once, and training goes on.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch.distributed as dist

from mindspeed_core.discovery.installed import installed_version
from mindspeed_core.errors import UserError
from mindspeed_core.terminal.listing import columns, for_terminal
from mindspeed_megatron.flag_notes import lines
from mindspeed_megatron.model_state import LoadedWeights
from mindspeed_megatron.spared_failures import SparedFailures
from mindspeed_train.checkpoint.save_policy import begun_from
from mindspeed_train.launch import last_save
from mindspeed_train.launch.last_save import LastSave
from mindspeed_train.monitoring import records
from mindspeed_train.monitoring.live import ENDED, LiveLine, Status
from mindspeed_train.monitoring.measures import detail_lines
from mindspeed_train.monitoring.records import RecordFile, Records
from mindspeed_train.monitoring.step_line import format_step
from mindspeed_train.monitoring.writers import open_writers
from mindspeed_train.output import silence

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_train.monitoring.writers import Writers

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)
"""Errors of an output that nobody will ever read again."""


def open_run_log(run: Run) -> RunLog:
    """Open the log of a run in the folder that all ranks share, and set ``run_dir`` and ``history``."""
    first, failures = run.dist.rank == 0, run.session.state(SparedFailures)
    run.run_dir = _shared_run_dir(run)
    log = RunLog(
        run.run_dir if first else None,
        total=run.args.train_iters,
        start=run.iteration,
        progress=run.args.progress,
        writers=open_writers(run.args, active=first, world_size=run.dist.world_size, failures=failures),
        failures=failures,
    )
    run.history = log.history
    begun = begun_from(run)
    if begun is not None:
        log.note_save(begun)
    return log


def _shared_run_dir(run: Run) -> Path:
    """Return the run's folder, named by rank 0 so that all ranks have the same."""
    chosen: list[Any] = [run.args.run_dir]
    if run.dist.rank == 0:
        folder = Path(chosen[0] or Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--run-dir {folder}: cannot be created: {error.strerror}") from error
        chosen = [str(folder)]
    if run.dist.world_size > 1:
        dist.broadcast_object_list(chosen, src=0, device=run.dist.device)
    return Path(chosen[0])


class RunLog:
    """The log of one run: prints and records its numbers on the rank that owns it, and is silent elsewhere.

    Attributes:
        history: the records of ``metrics.jsonl``, those of the run that is resumed included.
    """

    def __init__(
        self,
        run_dir: Path | None,
        *,
        total: int,
        start: int,
        progress: bool,
        output: TextIO | None = None,
        writers: Writers | None = None,
        failures: SparedFailures | None = None,
    ) -> None:
        """Open ``metrics.jsonl`` and, on a terminal, draw a live line.

        Args:
            run_dir: the run's folder; None on ranks that log nothing.
            total: steps of the whole run.
            start: steps already done (a resume); later records of an earlier attempt are moved aside.
            progress: show a live line when the output is a terminal.
            output: where lines go; standard output by default.
            writers: chart programs, which get every record too.
            failures: those that were told.
        """
        self.active = run_dir is not None
        self.history: Sequence[Mapping[str, Any]] = ()
        self.total = total
        self._output = output or sys.stdout
        self._writers = writers
        self._failures = failures or SparedFailures()
        self._run_dir = run_dir
        self._file: RecordFile | None = None
        self._unread = False
        self._live: LiveLine | None = None
        self._status = Status(total, start)
        if run_dir is None:
            return
        with self._failures.spare(f"--run-dir {run_dir}"):
            moved = records.go_back_to(run_dir, start)
            self._file = RecordFile(run_dir / records.NAME)
            self.history = Records(run_dir / records.NAME)
            if moved is not None:
                self.say(f"records behind step {start} are in {moved} now")
        if progress and self._output.isatty():
            self._live = LiveLine(self._output, self._status)

    def step(self, numbers: Mapping[str, Any]) -> None:
        """Show and record one logged step."""
        if not self.active:
            return
        self._record({name: value for name, value in numbers.items() if name != "memory_source"})
        self._status.step(numbers)
        self._write_status()
        if self._live is not None:
            self._live.update(self._status)
        for line in (format_step(numbers, self.total, columns(self._output)), *detail_lines(numbers)):
            self.say(line)

    def validation(self, step: int, losses: Mapping[str, float], split: str = "valid") -> None:
        """Show and record a validation."""
        if not self.active or "lm loss" not in losses:
            return
        key = "validation_loss" if split == "valid" else "test_loss"
        several = {name.removeprefix("lm loss "): loss for name, loss in losses.items() if name != "lm loss"}
        self._record({"step": step, key: losses["lm loss"], **{f"{key} {n}": v for n, v in several.items()}})
        name = "validation" if split == "valid" else "test"
        line = f"step {step:>{len(str(self.total))}}/{self.total} | {name} loss {losses['lm loss']:.6f}"
        self.say(" | ".join([line, *(f"{each} {loss:.6f}" for each, loss in several.items())]))

    def say(self, text: str) -> None:
        """Print lines, wrapped between words where a terminal is too narrow, above the live line."""
        if not self.active or self._unread:
            return
        try:
            text = for_terminal(text, self._output)
            self._print(text)
        except UnicodeEncodeError:
            self._print(text.encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError) as error:
            self._output_failed(error)

    def _print(self, text: str) -> None:
        if self._live is None:
            print(text, file=self._output, flush=True)
        else:
            self._live.say(text)

    def note_save(self, save: LastSave) -> None:
        """Note a published checkpoint in the run's folder."""
        if self._run_dir is not None:
            with self._failures.spare(f"--run-dir {self._run_dir}"):
                last_save.write(self._run_dir, save)

    def close(self, state: str = ENDED) -> None:
        """Close the files and stop the live line.

        Args:
            state: ``ended`` or ``failed``, the last one in ``status.json``.
        """
        self._drop_live_line()
        self._status.values = {**self._status.values, "state": state}
        self._write_status(at_once=True)
        if self._file is not None:
            self._file.close()
        if self._writers is not None:
            self._writers.close()
        self.active = False

    def _write_status(self, *, at_once: bool = False) -> None:
        if self._run_dir is not None:
            with self._failures.spare(f"--run-dir {self._run_dir}"):
                self._status.write(self._run_dir, at_once=at_once)

    def _record(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            with self._failures.spare(f"--run-dir {self._run_dir}"):
                self._file.add(record)
        if self._writers is not None:
            self._writers.record(record)

    def _output_failed(self, error: Exception) -> None:
        """Say nothing more where nobody reads; a disk that is full may have room later."""
        self._drop_live_line()
        if isinstance(error, ValueError) or error.errno in _GONE:  # type: ignore[attr-defined]
            self._unread = True
            if self._output is sys.stdout:
                # Whatever else prints there must not fail either.
                silence(self._output)
        self._failures.tell("standard output", error)

    def _drop_live_line(self) -> None:
        line, self._live = self._live, None
        if line is not None:
            line.stop()


def announce(run: Run, log: RunLog, seconds: float) -> None:
    """Say what is about to run, on how many ranks, with which features, after how long a set-up."""
    args, plan = run.args, run.session.plan
    parameters = sum(parameter.numel() for chunk in run.model for parameter in chunk.parameters())
    sizes = {
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "cp": args.context_parallel_size,
        "dp": args.data_parallel_size,
    }
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items())
    log.say(
        f"{run.session.platform.name} | world {run.dist.world_size} = {layout} | "
        f"{parameters:,} parameters on rank 0 | features: {', '.join(plan.names) or 'none'}"
    )
    log.say(run.session.provenance.get("platform", ""))
    if missing := missing_engine_note(run.session.platform.kinds(), installed_version("transformer-engine")):
        log.say(f"note: {missing}")
    for held in plan.held_back:
        log.say(f"held back: {held.name}: {held.reason}")
    for note in plan.notes:
        log.say(f"note: {note}")
    for line in lines(plan.flag_notes, explain=args.explain):
        log.say(line)
    start = _start(run)
    work = f"validating {start}" if args.skip_train else f"training {start} to step {args.train_iters}"
    where = "no files" if run.run_dir is None else f"files in {run.run_dir}"
    platform = run.session.platform
    source = "" if platform.dry_run else f", memory is {platform.peak_memory().source} of rank 0"
    log.say(f"{work}, set up in {seconds:.1f} s{source}, {where}")


def missing_engine_note(kinds: Collection[str], version: str) -> str:
    """Return one note in place of megatron-core's warnings, one for each module; empty where none is due.

    Args:
        kinds: of the platform; TransformerEngine exists for CUDA alone.
        version: of the installed TransformerEngine, empty for none.
    """
    if version or "cuda" not in kinds:
        return ""
    return (
        "TransformerEngine is not installed: layers and norms are megatron-core's local ones, the optimizer "
        "is torch's; mindspeed-features doctor says what is missed"
    )


def _start(run: Run) -> str:
    path = run.loaded.path
    if path is None and run.iteration:
        return f"from step {run.iteration}, which a feature loaded"
    if path is None:
        loaded = any(run.session.state(LoadedWeights).names.values())
        return "from step 0 with weights that a feature loaded" if loaded else "from scratch"
    if not run.iteration:
        return f"from step 0 with the weights of {path}"
    return f"from step {run.iteration} of {path}"

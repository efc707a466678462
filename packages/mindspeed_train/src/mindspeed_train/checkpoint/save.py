"""Saving: collect, plan, write on every rank, describe, publish; in the foreground or beside training.

Both ways run the same phases; only who writes differs: this process, or one beside it that reads a copy. A
phase ends with all ranks knowing how it went, so that a full disk or a lost writer on one of them is one
message, and the previous checkpoint stays the latest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

from mindspeed_core.errors import ArgumentError
from mindspeed_core.run import SaveInfo
from mindspeed_train.checkpoint import manifests, publish
from mindspeed_train.checkpoint.background import BackgroundProcess
from mindspeed_train.checkpoint.collective import FAILURES, on_all_ranks, on_first_rank
from mindspeed_train.checkpoint.destination import Destination, destination
from mindspeed_train.checkpoint.publication import Publication
from mindspeed_train.checkpoint.reasons import WorkerLost, reason_of
from mindspeed_train.checkpoint.retention import Retention
from mindspeed_train.checkpoint.saved_state import SavedState, collect_state
from mindspeed_train.checkpoint.shard_files import Digests, ShardFile
from mindspeed_train.checkpoint.shard_plan import FILES_PER_RANK, ShardPlan, make_plan
from mindspeed_train.checkpoint.staging import Staging
from mindspeed_train.checkpoint.writer import WRITER, job_of, write_rank
from mindspeed_train.fault_tolerance.hang_watch import Progress, seconds_to_hang
from mindspeed_train.launch.last_save import LastSave

if TYPE_CHECKING:
    from mindspeed_core.run import Run

logger = logging.getLogger("mindspeed_core")

_BACKEND = "torch_dist"
_LOOK_SECONDS = 0.05
_Staged = list[tuple[int, int]] | WorkerLost
"""Places of a rank's tensors in the memory that it shares with its writer, or why they have none."""
_SHARE_OF_HANG = 0.8
"""Of the time after which the hang watch ends the run: a writer that hangs is found before."""


@dataclass(frozen=True)
class _Target:
    """A checkpoint that is being written: where to, by this rank, its manifest, which others to keep."""

    destination: Destination
    temporary: Path
    manifest: manifests.Manifest
    retention: Retention

    @property
    def doing(self) -> str:
        return self.destination.doing


@dataclass
class _Pending:
    """A checkpoint on its way: its plan, this rank's files, and their writer or why there is none.

    ``publication`` is there once all ranks have written their files.
    """

    target: _Target
    plan: ShardPlan
    files: list[ShardFile]
    writer: BackgroundProcess | WorkerLost
    publication: Publication | None = None

    def abandon(self, limit: float) -> None:
        """Give it up; one that is being published may end within ``limit`` seconds."""
        _stop(self.writer)
        if self.publication is not None:
            self.publication.wait(limit)
            if self.publication.running():
                # Whatever is removed now may be written again.
                logger.warning(
                    "%s: not published after %g s; what is written of it stays there",
                    self.target.doing,
                    limit,
                )
                return
            if not self.publication.failed:
                self.target.destination.close()
                return
        self.target.destination.abandon()


class Saver:
    """The checkpoints that one session writes; at most one is on its way.

    Attributes:
        published: the checkpoint that this session published last.
    """

    def __init__(self) -> None:
        self.published: LastSave | None = None
        self._plan: ShardPlan | None = None
        self._process = ""
        self._writer: BackgroundProcess | None = None
        self._staging: Staging | None = None
        self._pending: _Pending | None = None
        self._waits = Progress()
        self._limit = 0.0

    def save(self, run: Run, reason: str) -> SaveInfo:
        """Save the run; returns when it is published, or, with ``--async-save``, when the writers run.

        Raises:
            CheckpointError: nothing was published; an earlier checkpoint is untouched.
        """
        args, session = run.args, run.session
        if not args.save:
            raise ArgumentError(
                "--save", None, "a checkpoint was asked for, but no folder is given", "add --save FOLDER"
            )
        self.poll(blocking=True)
        # A feature may save at any moment.
        run.complete_parameters()
        where = destination(run)
        try:
            session.call("before_save_checkpoint", run=run)
            try:
                self._write(run, where, in_background=bool(args.async_save) and reason == "interval")
            finally:
                session.call("after_load_checkpoint", run=run)
        except BaseException:
            where.abandon()
            raise
        return SaveInfo(path=where.path, iteration=run.iteration)

    def poll(self, *, blocking: bool) -> None:
        """Publish a checkpoint whose writers have finished. Collective while one is under way.

        A writer that was killed, or hangs, is found here; ``blocking`` waits for the others no longer then.

        Raises:
            CheckpointError: a background save failed.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            ended = self._advance(pending, blocking)
        except BaseException:
            self._pending = None
            pending.abandon(self._limit)
            raise
        if ended:
            self._pending = None
            pending.target.destination.close()
            self._note_published(pending.target)

    def _advance(self, pending: _Pending, blocking: bool) -> bool:
        """Bring a checkpoint as far as it goes, or without waiting; return whether it is published."""
        if pending.publication is None:
            digests = self._written(pending, blocking)
            if digests is None:
                return False
            everyones = _gathered(pending.plan, pending.files, digests)
            publish_it = partial(_publish, pending.target, pending.plan, everyones)
            pending.publication = Publication(publish_it if dist.get_rank() == 0 else None)
            if not blocking:
                return False
        while True:
            (any_runs,) = _on_any_rank(pending.publication.running())
            if not any_runs:
                break
            if not blocking:
                return False
            pending.publication.wait(_LOOK_SECONDS)
        on_first_rank(pending.target.doing, pending.publication.result)
        return True

    def _written(self, pending: _Pending, blocking: bool) -> Digests | None:
        """Return the digests of this rank's files once the writers of all ranks have finished, else None.

        Wait for them where ``blocking``.

        Raises:
            CheckpointError: one of them has failed.
        """
        writer, before = pending.writer, None
        while True:
            running = isinstance(writer, BackgroundProcess) and writer.running()
            lost = isinstance(writer, WorkerLost) or writer.failed
            progress = writer.progress if isinstance(writer, BackgroundProcess) else 0
            any_runs, any_lost, any_moved = _on_any_rank(running, lost, progress != before)
            if any_lost or not any_runs:
                break
            if not blocking:
                return None
            if any_moved:
                # Whoever waits for a disk that writes does not hang.
                self._waits.count += 1
            before = progress
            if isinstance(writer, BackgroundProcess):
                writer.wait(_LOOK_SECONDS)
        # After a failure nobody reads what the others write; they stop before the directory goes.
        return on_all_ranks(pending.target.doing, partial(_stop if running else _result, writer))

    def _write(self, run: Run, where: Destination, *, in_background: bool) -> None:
        doing = where.doing
        content: SavedState | None = None
        error: BaseException | None = None
        try:
            content = collect_state(run)
            where.begin()
        except FAILURES as caught:
            error = caught
        stale = self._plan is None or content is None or self._plan.layout != content.layout
        # The one exchange of a save whose layout is that of the last.
        ask = _ask_any_rank(error is not None, stale)
        staged: _Staged | None = None
        if in_background and content is not None and self._plan is not None and not stale and error is None:
            # Most likely nobody objects, and the ranks seldom come together.
            staged = self._stage(run, self._plan, content)
        any_failed, any_stale = ask()
        if any_failed:
            on_all_ranks(doing, lambda: _raise(error))
        assert content is not None
        if any_stale:
            self._plan, staged = None, None
            self._process = on_first_rank(doing, publish.process_id)
            self._plan = make_plan(doing, content.sharded, content.common, content.layout, run.pg.dp_cp)
        assert self._plan is not None
        target = _Target(where, where.settle(self._process), content.manifest, Retention.of(run.args))
        if in_background:
            if staged is None:
                staged = self._stage(run, self._plan, content)
            self._pending = self._start_writer(run, target, self._plan, content, staged)
            return
        files, digests = on_all_ranks(target.doing, partial(_write_now, run, target, self._plan, content))
        _finish(target, self._plan, files, digests)
        self._note_published(target)

    def _note_published(self, target: _Target) -> None:
        self.published = LastSave(target.manifest.iteration, str(target.destination.path))

    def _stage(self, run: Run, plan: ShardPlan, content: SavedState) -> _Staged:
        """Copy what this rank writes to where its writer reads it."""
        try:
            _, staging = self._beside(run)
            return staging.copy(plan.tensors(content.shards))
        except FAILURES as error:
            # The others are past the exchange, or wait in it; they learn of this at the next poll.
            return _no_writer(error)

    def _start_writer(
        self, run: Run, target: _Target, plan: ShardPlan, content: SavedState, staged: _Staged
    ) -> _Pending:
        self._waits = run.session.state(Progress)
        if isinstance(staged, WorkerLost):
            return _Pending(target, plan, [], staged)
        files: list[ShardFile] = []
        try:
            writer, staging = self._beside(run)
            run.session.platform.synchronize()
            files = plan.fill(content.shards, staged)
            job = job_of(target.temporary, [*files, *content.common_files], target.destination.upload())
            writer.start(job, staging.share)
        except FAILURES as error:
            return _Pending(target, plan, files, _no_writer(error))
        return _Pending(target, plan, files, writer)

    def _beside(self, run: Run) -> tuple[BackgroundProcess, Staging]:
        """Return what this session writes with in the background, made at its first such save."""
        if self._writer is None or self._staging is None:
            platform = run.session.platform
            self._limit = _SHARE_OF_HANG * seconds_to_hang(run.args)
            self._writer = BackgroundProcess(WRITER, limit=self._limit)
            on_host = platform.memory_is_host
            self._staging = Staging(self._writer, None if on_host else platform.pinned_empty)
            run.session.at_close(self._close)
        return self._writer, self._staging

    def _close(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.abandon(self._limit)
        writer, self._writer, self._staging = self._writer, None, None
        if writer is not None:
            writer.close()


def _no_writer(error: BaseException) -> WorkerLost:
    return WorkerLost(f"no writer could be started in the background: {reason_of(error)}")


def _on_any_rank(*flags: bool) -> list[bool]:
    """Return for each flag whether it is set on any rank. Collective."""
    return _ask_any_rank(*flags)()


def _ask_any_rank(*flags: bool) -> Callable[[], list[bool]]:
    """Begin what `_on_any_rank` does; the result waits for the other ranks. Collective."""
    if dist.get_world_size() == 1:
        return lambda: list(flags)
    found = torch.tensor(flags, dtype=torch.int32, device=torch.cuda.current_device())
    exchange = dist.all_reduce(found, op=dist.ReduceOp.MAX, async_op=True)

    def answer() -> list[bool]:
        exchange.wait()
        return [bool(value) for value in found.tolist()]

    return answer


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _result(writer: BackgroundProcess | WorkerLost) -> Digests:
    if isinstance(writer, WorkerLost):
        raise writer
    return {name: (size, digest) for name, (size, digest) in writer.result().items()}


def _stop(writer: BackgroundProcess | WorkerLost) -> None:
    if isinstance(writer, BackgroundProcess):
        writer.kill()


def _write_now(
    run: Run, target: _Target, plan: ShardPlan, content: SavedState
) -> tuple[list[ShardFile], Digests]:
    """Write this rank's files in the foreground."""
    tensors = [tensor.detach().to("cpu", non_blocking=True) for tensor in plan.tensors(content.shards)]
    run.session.platform.synchronize()
    files = plan.fill(content.shards, [_bytes_of(tensor) for tensor in tensors])
    progress = run.session.state(Progress)

    def beat() -> None:
        progress.count += 1

    everything = [*files, *content.common_files]
    upload = target.destination.upload()
    return files, write_rank(target.temporary, everything, upload, beat, threads=FILES_PER_RANK)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _finish(target: _Target, plan: ShardPlan, files: list[ShardFile], digests: Digests) -> None:
    """Complete the index, describe every file and publish. Collective."""
    everyones = _gathered(plan, files, digests)
    on_first_rank(target.doing, lambda: _publish(target, plan, everyones))
    target.destination.close()


def _gathered(plan: ShardPlan, files: list[ShardFile], digests: Digests) -> list[Any]:
    """Return the digests of all ranks' files and their places in the index, on rank 0. Collective."""
    everyones: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((digests, plan.results(files)), everyones)
    return everyones or []


def _publish(target: _Target, plan: ShardPlan, everyones: list[Any]) -> None:
    temporary, manifest = target.temporary, target.manifest
    files = {name: digest for digests, _ in everyones for name, digest in digests.items()}
    plan.write_index(temporary, [results for _, results in everyones])
    save_config(CheckpointingConfig(_BACKEND, 1), str(temporary))
    rest = [path for path in sorted(temporary.iterdir()) if path.name not in files]
    publish.sync_files(rest)
    files.update({path.name: manifests.digest_file(path) for path in rest})
    target.destination.finish(replace(manifest, files=dict(sorted(files.items()))), target.retention)

"""Saving: collect, write on every rank, describe, publish; in the foreground or beside training.

Both ways run the same phases; only who waits for the writers differs. Each phase ends with all ranks knowing
how it went, so that a full disk on one of them is one message, and the previous checkpoint stays the latest.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from mindspeed_core.errors import ArgumentError, CheckpointError
from mindspeed_core.hosts.standalone.checkpoint import content as checkpoint_content
from mindspeed_core.hosts.standalone.checkpoint import publish
from mindspeed_core.hosts.standalone.checkpoint.collective import on_all_ranks, on_first_rank
from mindspeed_core.hosts.standalone.checkpoint.model_arguments import model_arguments
from mindspeed_core.hosts.standalone.checkpoint.results import use_file_results
from mindspeed_core.hosts.standalone.checkpoint.save_folder import SaveFolder, own
from mindspeed_core.launch.environment import current_job
from mindspeed_core.megatron import model_state, optimizer_state
from mindspeed_core.megatron.feature_state import feature_parts
from mindspeed_core.run import SaveInfo
from mindspeed_core.runtime.gather import all_gather_values

if TYPE_CHECKING:
    from mindspeed_core.run import Run

logger = logging.getLogger("mindspeed_core")

_BACKEND = "torch_dist"
_COMMON = "common.pt"


@dataclass(frozen=True)
class _Target:
    """A checkpoint that is being written: its directory, manifest and how many earlier ones to keep."""

    temporary: Path
    manifest: publish.Manifest
    keep: int | None
    folder: SaveFolder

    @property
    def what(self) -> str:
        final = self.temporary.parent / publish.directory_name(self.manifest.iteration)
        return f"saving {final}"


class Saver:
    """The checkpoints that one session writes; at most one is on its way."""

    def __init__(self) -> None:
        self._queue = AsyncCallsQueue(persistent=False)
        self._failure: CheckpointError | None = None

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
        save_dir = Path(args.save)
        temporary = Path(on_first_rank(f"--save {save_dir}", lambda: str(_begin(run, save_dir))))
        # A feature may save at any moment.
        run.complete_parameters()
        try:
            session.call("before_save_checkpoint", run=run)
            try:
                self._write(run, temporary, in_background=bool(args.async_save) and reason == "interval")
            finally:
                session.call("after_load_checkpoint", run=run)
        except BaseException:
            if dist.get_rank() == 0:
                publish.abandon(temporary)
            raise
        return SaveInfo(path=save_dir / publish.directory_name(run.iteration), iteration=run.iteration)

    def poll(self, *, blocking: bool) -> None:
        """Publish a checkpoint whose writers have finished. Collective while one is under way.

        Raises:
            CheckpointError: a background save failed.
        """
        if self._queue.get_num_unfinalized_calls():
            self._queue.maybe_finalize_async_calls(blocking=blocking)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write(self, run: Run, temporary: Path, *, in_background: bool) -> None:
        described = checkpoint_content.layout_metadata(run)
        features = feature_parts(run)
        target = _Target(
            temporary,
            self._manifest(run, tuple(features)),
            run.args.keep_last_n,
            run.session.state(SaveFolder),
        )
        weights = select_saved(run, described)
        try:
            state = checkpoint_content.sharded_state(
                run,
                described,
                weights,
                is_loading=False,
                with_optimizer=not run.args.no_save_optim,
                with_rng=not run.args.no_save_rng,
                features=features,
            )
        finally:
            if run.optimizer is not None:
                optimizer_state.forget_overrides(run.optimizer)
        state.update(checkpoint_content.common_state(run))
        state["content_metadata"] = checkpoint_content.without_groups(described)
        sharded = on_all_ranks(target.what, lambda: _write_common(state, temporary))
        use_file_results(run.session)
        request = _strategy(run).async_save(sharded, temporary)
        write = request.async_fn
        if write is not None:
            request = request._replace(async_fn=partial(_write_and_digest, write, temporary, dist.get_rank()))
        finish = request.finalize_fns
        if in_background:
            request = request._replace(finalize_fns=[partial(self._finish_quietly, target, finish)])
            self._queue.schedule_async_request(request)
            return
        on_all_ranks(target.what, lambda: _run_writers(request))
        _finish(target, finish)

    def _manifest(self, run: Run, features: tuple[str, ...]) -> publish.Manifest:
        return publish.Manifest(
            iteration=run.iteration,
            files={},
            plan=run.session.plan.as_dict(),
            versions=checkpoint_content.versions(run),
            layout=checkpoint_content.layout(run),
            model=model_arguments(run.args),
            features=features,
            job=current_job().name,
        )

    def _finish_quietly(self, target: _Target, finish: list[Callable[[], None]]) -> None:
        # Raising here would leave megatron-core's queue between two collectives; `poll` raises afterwards.
        try:
            _finish(target, finish)
        except CheckpointError as error:
            self._failure = error
            if dist.get_rank() == 0:
                publish.abandon(target.temporary)


def _begin(run: Run, save_dir: Path) -> Path:
    own(run.session, save_dir)
    return publish.begin(save_dir, run.iteration)


def select_saved(run: Run, described: Mapping[str, Any]) -> model_state.Selection:
    """Return the weights that a save holds; collective where a feature chooses them.

    Raises:
        CheckpointError: a feature leaves weights out that are trained.
    """
    weights = model_state.select(run, described)
    if weights.chosen is not weights.all:
        on_all_ranks(f"--save {run.args.save}", lambda: model_state.check_saved(run, weights))
    return weights


def _strategy(run: Run) -> Any:
    strategy = TorchDistSaveShardedStrategy(_BACKEND, 1)
    if run.pg.dp_cp.size() == 1:
        return strategy
    # Replicas share the writing instead of leaving all of it to the first.
    return FullyParallelSaveStrategyWrapper(strategy, run.pg.dp_cp)


def _write_common(state: dict[str, Any], temporary: Path) -> Any:
    sharded, common = save_preprocess(state)
    checkpoint_content.check_plain(common)
    if dist.get_rank() == 0:
        # Through memory: torch's own writer hides why the operating system refused.
        content = io.BytesIO()
        torch.save(common, content)
        publish.write_synced(temporary / _COMMON, content.getbuffer())
    return sharded


def _run_writers(request: AsyncRequest) -> None:
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[1] = request.preload_fn()
    if request.async_fn is not None:
        request.async_fn(*arguments, **request.async_fn_kwargs)


def _write_and_digest(write: Callable[..., None], temporary: Path, rank: int, *arguments: Any) -> None:
    """Write this rank's shards and take their digests while the pages are still in memory.

    Runs in a forked process when the save is in the background, hence the file.
    """
    write(*arguments)
    try:
        digests = {path.name: publish.digest_file(path) for path in temporary.glob(f"__{rank}_*.distcp")}
        publish.write_synced(temporary / _digest_name(rank), json.dumps(digests))
    except OSError as error:
        # The reason has to get through a full disk; the shards, of no use any more, make room for it.
        for path in temporary.glob(f"__{rank}_*.distcp"):
            path.unlink()
        # Where another rank took that room, its own reason gets through; here only the digests are missing.
        with suppress(OSError):
            (temporary / _digest_name(rank)).write_text(json.dumps(publish.explain(error)), encoding="utf-8")


def _digest_name(rank: int) -> str:
    return f".digests-{rank}.json"


def _finish(target: _Target, finish: list[Callable[[], None]]) -> None:
    """Complete the index, describe every file and publish. Collective."""
    on_all_ranks(target.what, lambda: [function() for function in finish])
    digests = on_all_ranks(target.what, lambda: _take_digests(target.temporary))
    gathered = all_gather_values(digests)
    on_first_rank(target.what, lambda: _publish(target, gathered))


def _take_digests(temporary: Path) -> dict[str, tuple[int, str]]:
    rank = dist.get_rank()
    path = temporary / _digest_name(rank)
    written = sorted(file.name for file in temporary.glob(f"__{rank}_*.distcp"))
    if not path.exists():
        if written:
            raise CheckpointError(f"{temporary}: the writer of rank {rank} ended before it was done")
        return {}
    text = path.read_text(encoding="utf-8")
    # Empty where even the reason found no room.
    found = json.loads(text) if text else "no space left on the device; free some, or lower --keep-last-n"
    if isinstance(found, str):
        raise CheckpointError(f"saving {temporary} (rank {rank}): {found}")
    digests = {name: (size, digest) for name, (size, digest) in found.items()}
    path.unlink()
    if sorted(digests) != written:
        raise CheckpointError(f"{temporary}: rank {rank} wrote {written}, but described {sorted(digests)}")
    return digests


def _publish(target: _Target, gathered: list[dict[str, tuple[int, str]]]) -> None:
    temporary, manifest = target.temporary, target.manifest
    target.folder.check()
    save_config(CheckpointingConfig(_BACKEND, 1), str(temporary))
    files = {name: entry for part in gathered for name, entry in part.items()}
    rest = [path for path in sorted(temporary.iterdir()) if path.name not in files]
    publish.sync_files(rest)
    files.update({path.name: publish.digest_file(path) for path in rest})
    final = publish.publish(temporary, replace(manifest, files=dict(sorted(files.items()))))
    if target.keep is not None:
        try:
            publish.keep_last(final.parent, target.keep, final)
        except OSError as error:
            # The new checkpoint is safe; an old one that cannot be deleted is no reason to stop training.
            logger.warning("--keep-last-n: %s", publish.explain(error))

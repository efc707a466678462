"""The place that a save ends up in: a folder, or an object store that receives it from a staging folder.

Both are used alike: `begin` and `settle`, then every rank writes files and uploads them where `upload` asks
for it, then rank 0 calls `finish`. All but the writing happens in the training process.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.tracker import directory_name
from mindspeed_train.checkpoint import manifests, publish, staged_files
from mindspeed_train.checkpoint.collective import on_first_rank
from mindspeed_train.checkpoint.object_store import ObjectStore
from mindspeed_train.checkpoint.os_errors import explain
from mindspeed_train.checkpoint.retention import Retention
from mindspeed_train.checkpoint.save_folder import SaveFolder, own
from mindspeed_train.checkpoint.store_url import folder_of

if TYPE_CHECKING:
    from mindspeed_core.run import Run

logger = logging.getLogger("mindspeed_core")


class Destination(Protocol):
    """One save on its way.

    Attributes:
        path: the checkpoint's folder, or its URL as text.
        doing: begins messages about the save.
    """

    path: Path | str
    doing: str

    def begin(self) -> None:
        """Make the folder that this rank writes into."""

    def settle(self, process: str) -> Path:
        """Return that folder; ``process`` is the `publish.process_id` of rank 0. Collective for a store."""

    def upload(self) -> dict[str, str] | None:
        """Describe where files go that a rank has written, as `ObjectStore` does; None if they stay."""

    def finish(self, manifest: manifests.Manifest, retention: Retention) -> None:
        """Make the checkpoint visible and the latest, and delete older ones; on rank 0."""

    def abandon(self) -> None:
        """Remove what a failed save has written; on every rank."""

    def close(self) -> None:
        """Remove what a published save needs no longer; on every rank."""


def destination(run: Run) -> Destination:
    """Return the destination of a save into ``--save``."""
    folder = folder_of(run.args.save)
    return _Folder(run, folder) if folder is not None else _Store(run.args, run.iteration)


class _Folder:
    """A checkpoint that is written where it stays."""

    def __init__(self, run: Run, save_dir: Path) -> None:
        iteration = run.iteration
        self.path: Path | str = save_dir / directory_name(iteration)
        self.doing = f"saving {self.path}"
        self._session, self._save_dir, self._iteration = run.session, save_dir, iteration
        self._temporary = save_dir / publish.temporary_name(iteration)

    def begin(self) -> None:
        if dist.get_rank() == 0:
            own(self._session, self._save_dir)
            publish.begin(self._save_dir, self._iteration)

    def settle(self, process: str) -> Path:
        self._temporary = self._save_dir / publish.temporary_name(self._iteration, process)
        return self._temporary

    def upload(self) -> dict[str, str] | None:
        return None

    def finish(self, manifest: manifests.Manifest, retention: Retention) -> None:
        self._session.state(SaveFolder).check()
        for name, (size, _) in manifest.files.items():
            found = (self._temporary / name).stat().st_size
            if found != size:
                path = self._temporary / name
                raise CheckpointError(f"{path}: has {found} bytes, of {size} that were written")
        before = publish.latest_step(self._save_dir)
        final = publish.publish(self._temporary, manifest)
        try:
            if retention.keep_last_n is not None:
                publish.keep_last(final.parent, retention.keep_last_n, final)
            if before is not None and retention.retires(before, manifest.iteration):
                publish.delete_step(final.parent, before)
        except OSError as error:
            # The new checkpoint is safe; an old one that cannot be deleted is no reason to stop training.
            logger.warning("an old checkpoint stays: %s", explain(error))

    def abandon(self) -> None:
        if dist.get_rank() == 0:
            publish.abandon(self._temporary)

    def close(self) -> None:
        """Leave the published folder alone."""


class _Store:
    """A checkpoint that every rank stages on its own disk and uploads from there."""

    def __init__(self, args: Namespace, iteration: int) -> None:
        self._store = ObjectStore(args.save)
        self._args, self._iteration = args, iteration
        self.path: Path | str = f"{self._store.url}/{directory_name(iteration)}"
        self.doing = f"saving {self.path}"
        self._save = ""
        self._staged: Path | None = None

    def begin(self) -> None:
        root = staged_files.staging_root(self._args)
        self.doing = f"{self.doing} (staged in {staged_files.FLAG} {root})"
        self._staged = staged_files.private_folder(root, directory_name(self._iteration))

    def settle(self, process: str) -> Path:
        self._save = on_first_rank(self.doing, lambda: self._store.begin(self._iteration))
        assert self._staged is not None
        return self._staged

    def upload(self) -> dict[str, str] | None:
        return self._store.describe_upload(self._save)

    def finish(self, manifest: manifests.Manifest, retention: Retention) -> None:
        sizes = self._store.sizes(self._save)
        # What rank 0 wrote beside the shards: the index and the common state.
        assert self._staged is not None
        rest = [self._staged / name for name in manifest.files if name not in sizes]
        self._store.upload(self._save, [path for path in rest if path.is_file()])
        before = self._store.latest_step() if retention.interval else None
        self._store.publish_save(self._save, manifest)
        if retention.keep_last_n is not None:
            self._store.keep_last(retention.keep_last_n, manifest.iteration)
        if before is not None and retention.retires(before, manifest.iteration):
            self._store.delete_step(before)

    def abandon(self) -> None:
        self.close()
        if dist.get_rank() == 0 and self._save:
            self._store.abandon(self._save)

    def close(self) -> None:
        if self._staged is not None:
            staged_files.remove(self._staged)

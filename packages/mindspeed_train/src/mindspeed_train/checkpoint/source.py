"""Finding and fetching of checkpoints, wherever they are: in a folder, or in an object store.

A checkpoint in a store is downloaded into a staging folder and read there as any other one; messages name the
URL.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.tracker import directory_name, iteration_of
from mindspeed_train.checkpoint import manifests, publish, staged_files
from mindspeed_train.checkpoint.collective import on_all_ranks, on_first_rank
from mindspeed_train.checkpoint.object_store import ObjectStore
from mindspeed_train.checkpoint.store_url import check_url, folder_of, is_url


def prepare_saving(location: str, *, will_save: bool) -> None:
    """Clear away what dead runs left in ``--save``; where it is a store, find out that it can be written.

    Raises:
        CheckpointError: the store refuses.
    """
    folder = folder_of(location)
    if folder is not None:
        publish.clean_stale(folder)
        return
    store = ObjectStore(location)
    if will_save:
        store.check_writable()
        store.clean_stale()


def find(location: str, step: int | None, *, accept_unpublished: bool) -> publish.FoundCheckpoint | None:
    """Choose the checkpoint to load from a folder or a store, see `publish.find`."""
    folder = folder_of(location)
    if folder is None:
        return ObjectStore(location).find(step, accept_unpublished=accept_unpublished)
    return _unnested(publish.find(folder, step, accept_unpublished=accept_unpublished))


def latest_step(location: str) -> int | None:
    """Return the step that a run would go on from in a folder or a store; None where there is none."""
    folder = folder_of(location)
    if folder is not None:
        return publish.latest_step(folder)
    found = ObjectStore(location).find(accept_unpublished=True)
    return None if found is None else iteration_of(found.path.name)


def find_of_job(location: str, job: str) -> publish.FoundCheckpoint | None:
    """Find the checkpoint that a job published last, or None."""
    folder = folder_of(location)
    if folder is None:
        return ObjectStore(location).find_of_job(job)
    return _unnested(publish.find_of_job(folder, job))


def find_single(location: str) -> publish.FoundCheckpoint | None:
    """Return the one checkpoint that a location names; None where it names a folder of them, or nothing.

    Raises:
        CheckpointError: its manifest is damaged.
        ArgumentError: nothing on this machine can open the URL.
    """
    if is_url(location):
        check_url("load_checkpoint", location)
    folder = folder_of(location)
    if folder is None:
        manifest = ObjectStore(location).manifest()
        name = location.rstrip("/").rpartition("/")[2]
        return (
            None
            if manifest is None
            else publish.FoundCheckpoint(Path(name), manifest, url=location.rstrip("/"))
        )
    if not (folder / manifests.MANIFEST).is_file():
        return None
    return _unnested(publish.FoundCheckpoint(folder, manifests.read_manifest(folder)))


def folder_with(checkpoint: publish.FoundCheckpoint) -> str:
    """Return the folder or URL that a checkpoint lies in."""
    if checkpoint.url:
        return checkpoint.url.rpartition("/")[0]
    path = checkpoint.path
    return str(path.parent if iteration_of(path.name) is not None else path.parent.parent)


def published_names(location: str) -> list[tuple[str, str]]:
    """Return name and place of the published checkpoints of a folder or a store."""
    folder = folder_of(location)
    if folder is None:
        store = ObjectStore(location)
        return [(name, f"{store.url}/{name}") for name in store.published()]
    paths = sorted(path.parent for path in folder.glob(f"iter_*/{manifests.MANIFEST}"))
    return [(path.name, str(path)) for path in paths]


@contextmanager
def local_copy(args: Namespace, checkpoint: publish.FoundCheckpoint) -> Iterator[publish.FoundCheckpoint]:
    """Provide a checkpoint as files of this machine in a ``with`` block. Collective.

    Files from a store are compared with the manifest as ``--verify-checkpoint`` says, in every copy.

    Raises:
        CheckpointError: a file is missing or was changed, or the staging folder is too small.
    """
    if not checkpoint.url:
        yield checkpoint
        return
    action = f"loading {checkpoint.url}"
    store, name = ObjectStore(folder_with(checkpoint)), checkpoint.url.rpartition("/")[2]
    files = on_first_rank(action, lambda: staged_files.stored_files(store, name, checkpoint.manifest))
    iteration = iteration_of(name) or 0
    shared = staged_files.share_folder(action, args, directory_name(iteration))
    try:
        on_all_ranks(action, lambda: staged_files.check_room(shared.path, sum(file.size for file in files)))
        contents = args.verify_checkpoint == "hash"

        def fetch() -> None:
            for file in files[shared.place :: shared.count]:
                staged_files.download(store, name, file, shared.path, contents=contents)

        on_all_ranks(action, fetch)
        manifest = None if checkpoint.manifest is None else staged_files.flattened(checkpoint.manifest)
        try:
            yield replace(checkpoint, path=shared.path, manifest=manifest)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(shared.path), checkpoint.url)) from error
        # Nobody reads any more.
        on_all_ranks(action, lambda: None)
    finally:
        if shared.place == 0:
            staged_files.remove(shared.path)


def where_files_are(
    path: Path, manifest: manifests.Manifest | None
) -> tuple[Path, manifests.Manifest | None]:
    """Return the folder and manifest of a checkpoint's files.

    One that was copied from a store as it lies there has them in one subfolder.
    """
    folders = {name.rpartition("/")[0] for name in manifest.files} if manifest is not None else set()
    if manifest is None or len(folders) != 1 or folders == {""}:
        return path, manifest
    return path / folders.pop(), staged_files.flattened(manifest)


def _unnested(found: publish.FoundCheckpoint | None) -> publish.FoundCheckpoint | None:
    if found is None:
        return None
    path, manifest = where_files_are(found.path, found.manifest)
    return replace(found, path=path, manifest=manifest)

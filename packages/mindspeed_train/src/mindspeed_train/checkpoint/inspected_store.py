"""A copy of a checkpoint in an object store to look at, without a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.tracker import directory_name, iteration_of
from mindspeed_train.checkpoint import manifests, publish, source, staged_files
from mindspeed_train.checkpoint.object_store import ObjectStore
from mindspeed_train.checkpoint.store_url import check_url, folder_of

_READ = ("index.json", ".metadata", "common.pt", "metadata.json")


@contextmanager
def local_copy_for_inspection(
    url: str, step: int | None, *, whole: bool
) -> Iterator[tuple[Path, Callable[[Any], Any]]]:
    """Provide a checkpoint in a store as a folder of this machine in a ``with`` block.

    Args:
        url: a prefix of checkpoints, or that of one.
        step: this step instead of the latest; only with a prefix of several.
        whole: download every file; otherwise shards are as large as in the store, and empty.

    Yields:
        The folder, and a function that puts the URL in its place in whatever text a value holds.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    check_url("CHECKPOINT", url)
    folder = folder_of(url)
    if folder is not None:
        yield folder, lambda value: value
        return
    found = source.find_single(url) or source.find(url, step, accept_unpublished=True)
    if found is None:
        raise CheckpointError(f"{url}: holds no checkpoint (no {directory_name(0)[:5]}… prefix)")
    store, name = ObjectStore(source.folder_with(found)), found.url.rpartition("/")[2]
    root = staged_files.staging_root()
    copy = staged_files.private_folder(root, directory_name(iteration_of(name) or 0))
    try:
        files = staged_files.stored_files(store, name, found.manifest)
        sizes = {**store.sizes(name), **_nested_sizes(store, name, files)}
        staged_files.check_room(root, sum(file.size for file in files if whole or file.name in _READ))
        for file in files:
            if whole or file.name in _READ:
                if file.object in sizes:
                    store.download(f"{name}/{file.object}", copy / file.name)
            elif file.object in sizes:
                with (copy / file.name).open("wb") as placeholder:
                    placeholder.truncate(sizes[file.object])
        if found.manifest is not None:
            text = manifests.describe(staged_files.flattened(found.manifest))
            publish.write_synced(copy / manifests.MANIFEST, text)

        def named(value: Any) -> Any:
            if isinstance(value, str):
                return value.replace(str(copy), found.url)
            if isinstance(value, list):
                return [named(item) for item in value]
            return {key: named(item) for key, item in value.items()} if isinstance(value, dict) else value

        try:
            yield copy, named
        except CheckpointError as error:
            raise CheckpointError(named(str(error))) from error
    finally:
        staged_files.remove(copy)


def _nested_sizes(store: ObjectStore, name: str, files: list[staged_files.StoredFile]) -> dict[str, int]:
    folders = {file.object.rpartition("/")[0] for file in files} - {""}
    return {
        f"{folder}/{file}": size
        for folder in folders
        for file, size in store.sizes(f"{name}/{folder}").items()
    }

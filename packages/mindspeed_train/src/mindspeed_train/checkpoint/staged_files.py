"""Staging: folders of this machine that hold files on their way to and from an object store.

megatron-core and torch write and read files, and files are what is checked. A save is written here before it
is uploaded; a checkpoint is downloaded once per machine, by its ranks together, before it is read. Both are
gone when their work is done, and what a killed run left goes at the next start.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from mindspeed_core.errors import CheckpointError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_train.checkpoint import manifests, publish
from mindspeed_train.checkpoint.collective import on_all_ranks
from mindspeed_train.checkpoint.object_store import ObjectStore
from mindspeed_train.checkpoint.os_errors import explain

FLAG = "--checkpoint-staging"


@dataclass(frozen=True)
class SharedFolder:
    """A folder of one machine, and this rank's place among the ranks that see it."""

    path: Path
    place: int
    count: int


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint in a store: its object, its size in bytes and SHA-256 (empty if unknown)."""

    object: str
    size: int
    digest: str

    @property
    def name(self) -> str:
        """Return its name in the checkpoint."""
        return self.object.rpartition("/")[2]


def staging_root(args: Namespace | None = None) -> Path:
    """Return the folder that ``--checkpoint-staging`` names, or one of this user's own for temporary files.

    Raises:
        CheckpointError: it cannot be made, or belongs to somebody else.
    """
    chosen = getattr(args, "checkpoint_staging", None)
    root = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"mindspeed-staging-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.lstat()
    except OSError as error:
        raise CheckpointError(f"{FLAG} {root}: {explain(error)}") from error
    if not chosen and (
        not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022
    ):
        # Its name can be guessed, and what is read from it is trusted once it is verified.
        raise CheckpointError(f"{FLAG} {root}: belongs to somebody else; name a folder of your own")
    return root


def private_folder(root: Path, name: str) -> Path:
    """Make a folder of this process in the staging folder, and clear away what dead processes left there.

    Raises:
        CheckpointError: it cannot be made.
    """
    folder = root / f".tmp-{name}-{publish.process_id()}"
    try:
        # Ranks of one machine clear away together.
        with suppress(FileNotFoundError):
            publish.clean_stale(root)
        remove(folder)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise CheckpointError(f"{FLAG} {root}: {explain(error)}") from error
    return folder


def remove(folder: Path) -> None:
    """Remove a staging folder."""
    shutil.rmtree(folder, ignore_errors=True)


def check_room(root: Path, needed: int) -> None:
    """Refuse to stage more bytes than are free.

    Raises:
        CheckpointError: the disk is too small.
    """
    free = shutil.disk_usage(root).free
    if needed > free:
        raise CheckpointError(
            f"{FLAG} {root}: {free / 2**30:.2f} GiB are free, and the checkpoint has "
            f"{needed / 2**30:.2f} GiB; name a folder on a larger disk"
        )


def share_folder(doing: str, root_of: Namespace, name: str) -> SharedFolder:
    """Make one folder on every machine. Collective.

    Ranks share what they see: those of one machine in containers of their own have a folder each.
    """
    rank = dist.get_rank()
    machines = all_gather_values(_machine())
    leader = machines.index(machines[rank])

    def make() -> Path:
        return private_folder(staging_root(root_of), name)

    made = all_gather_values(on_all_ranks(doing, lambda: make() if leader == rank else None))
    theirs = made[leader]
    assert theirs is not None
    alone = on_all_ranks(doing, lambda: None if theirs.is_dir() else make())
    chosen = (machines[rank], str(alone or theirs))
    everyones = all_gather_values(chosen)
    members = [member for member, folder in enumerate(everyones) if folder == chosen]
    return SharedFolder(Path(chosen[1]), members.index(rank), len(members))


def _machine() -> str:
    with suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return socket.gethostname()


def stored_files(store: ObjectStore, name: str, manifest: manifests.Manifest | None) -> list[StoredFile]:
    """Return the files of a checkpoint, the largest first; ``name`` is its prefix below the store's own.

    Raises:
        CheckpointError: two of them would have one name.
    """
    if manifest is None:
        found = [StoredFile(file, size, "") for file, size in store.sizes(name).items()]
    else:
        found = [StoredFile(file, size, digest) for file, (size, digest) in manifest.files.items()]
    if len({file.name for file in found}) < len(found) or any(file.name in ("", ".") for file in found):
        raise CheckpointError(
            f"{store.url}/{name}/{manifests.MANIFEST}: lists files that have no name of their own"
        )
    return sorted(found, key=lambda file: (-file.size, file.name))


def download(store: ObjectStore, name: str, file: StoredFile, folder: Path, *, contents: bool) -> None:
    """Copy one file of a checkpoint into a folder and compare it with the manifest.

    Args:
        store: where it lies.
        name: the checkpoint's prefix below the store's own.
        file: the file.
        folder: receives it under its own name.
        contents: compare the SHA-256 too, and not the size alone.

    Raises:
        CheckpointError: it is missing or another one than was written.
    """
    store.download(f"{name}/{file.object}".lstrip("/"), folder / file.name)
    contents = contents and bool(file.digest)
    one = manifests.Manifest(iteration=0, files={file.name: (file.size, file.digest)}, sealed=True)
    for problem in manifests.check_files(folder, one, [file.name], contents=contents):
        named = problem.replace(str(folder), f"{store.url}/{name}".rstrip("/"))
        raise CheckpointError(f"{named}; load an earlier checkpoint with --ckpt-step")


def flattened(manifest: manifests.Manifest) -> manifests.Manifest:
    """Return the manifest of a downloaded checkpoint, whose files are all in one folder."""
    return replace(manifest, files={name.rpartition("/")[2]: entry for name, entry in manifest.files.items()})

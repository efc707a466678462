"""Write the files of one rank; runs in the training process, or beside it without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_train.checkpoint.shard_files import Digests, ShardFile, write_files

WRITER = f"{__name__}:write_job"
"""Work of the process beside training, as ``module:function``."""


def job_of(folder: Path, files: Sequence[ShardFile], upload: Mapping[str, Any] | None) -> dict[str, Any]:
    """Describe to a process what it has to write, in plain types.

    Args:
        folder: receives the files.
        files: their names and contents.
        upload: where they are uploaded from there, as `ObjectStore.describe_upload` says it.
    """
    return {
        # A trainer may change its directory.
        "folder": str(folder.absolute()),
        "files": [(file.name, file.items) for file in files],
        "upload": upload,
    }


def write_job(job: Mapping[str, Any], shared: memoryview, beat: Callable[[], None]) -> Digests:
    """Do what `job_of` describes."""
    files = [ShardFile(name, items) for name, items in job["files"]]
    return write_rank(Path(job["folder"]), files, job["upload"], beat, shared=shared)


def write_rank(
    folder: Path,
    files: Sequence[ShardFile],
    upload: Mapping[str, Any] | None,
    beat: Callable[[], None],
    *,
    shared: memoryview | None = None,
    threads: int = 1,
) -> Digests:
    """Write files and upload them where that is asked for; see `write_files`."""
    digests = write_files(folder, files, beat, shared=shared, threads=threads)
    if upload is not None:
        from mindspeed_train.checkpoint.object_store import ObjectStore

        ObjectStore.of_upload(upload).upload(upload["save"], [folder / file.name for file in files], beat)
    return digests

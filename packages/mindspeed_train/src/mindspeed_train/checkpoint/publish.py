"""Publishing of checkpoint directories: all at once, at the very end, whatever interrupts it.

A checkpoint is written into a temporary directory, described by a manifest (sizes, SHA-256 of every file),
forced to disk and renamed; only then does the tracker name it. This module knows files and directories, not
tensors, ranks or torch, so that every crash point can be tested in one process.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.tracker import PUBLISHED, TRACKER
from mindspeed_megatron.tracker import directory_name as directory_name
from mindspeed_megatron.tracker import iteration_of as iteration_of
from mindspeed_train.checkpoint.manifests import MANIFEST as MANIFEST
from mindspeed_train.checkpoint.manifests import Manifest as Manifest
from mindspeed_train.checkpoint.manifests import check_files as check_files
from mindspeed_train.checkpoint.manifests import describe as describe
from mindspeed_train.checkpoint.manifests import digest_file as digest_file
from mindspeed_train.checkpoint.manifests import read_manifest
from mindspeed_train.checkpoint.older_formats import RELEASE, refuse_older_format, refuse_without_step
from mindspeed_train.checkpoint.os_errors import explain
from mindspeed_train.checkpoint.processes import host_name, start_of

_TEMPORARY = re.compile(r"\.(?:tmp|del)-iter_\d{7,}-(?P<owner>.+-\d+-\d+)\Z")
_FOREIGN_AGE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class FoundCheckpoint:
    """The checkpoint that `find` chose.

    Attributes:
        path: its directory.
        manifest: its manifest; None only where a directory without one was asked for.
        warning: why it is not the one the tracker names, or empty.
        note: that it is not the one that was completed last, or empty.
        url: where it lies in an object store, or empty; ``path`` is then where its files are staged.
    """

    path: Path
    manifest: Manifest | None
    warning: str = ""
    note: str = ""
    url: str = ""


def temporary_name(iteration: int, process: str = "") -> str:
    """Return the name of a checkpoint that is being written.

    Args:
        iteration: training steps done.
        process: `process_id` of who begins and publishes it; this process by default.
    """
    return f".tmp-{directory_name(iteration)}-{process or process_id()}"


def begin(save_dir: Path, iteration: int) -> Path:
    """Make the temporary directory of a new checkpoint, and clear away what dead runs left behind.

    Raises:
        CheckpointError: the directory cannot be made.
    """
    temporary = save_dir / temporary_name(iteration)
    try:
        save_dir.mkdir(parents=True, exist_ok=True)
        clean_stale(save_dir)
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
    except OSError as error:
        raise CheckpointError(f"--save {save_dir}: {explain(error)}") from error
    return temporary


def abandon(temporary: Path) -> None:
    """Remove what a failed save has written; nothing that was published is touched."""
    shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, manifest: Manifest) -> Path:
    """Make a completely written checkpoint visible and the latest.

    Args:
        temporary: the directory from `begin`; its files are written and forced to disk by their writers.
        manifest: describes every file in it.

    Returns:
        The final directory.
    """
    save_dir = temporary.parent
    final = save_dir / directory_name(manifest.iteration)
    write_synced(temporary / MANIFEST, describe(manifest))
    sync_directory(temporary)
    replaced = None
    if final.exists() or final.is_symlink():
        replaced = save_dir / f".del-{final.name}-{process_id()}"
        os.rename(final, replaced)
    os.rename(temporary, final)
    sync_directory(save_dir)
    write_tracker(save_dir, str(manifest.iteration))
    if replaced is not None:
        _remove(replaced)
    return final


def write_tracker(save_dir: Path, named: str) -> None:
    """Name the latest checkpoint of a folder, by step or as ``release``; it is on disk when this returns."""
    beside = save_dir / f"{TRACKER}.tmp"
    write_synced(beside, named)
    os.replace(beside, save_dir / TRACKER)
    sync_directory(save_dir)


def keep_last(save_dir: Path, count: int, latest: Path) -> list[Path]:
    """Delete all but the ``count`` most recently written checkpoints, never ``latest``.

    Recency is the time of writing, not the step number: after going back to an older step, checkpoints of the
    abandoned course have higher numbers. Links and directories without manifest are left alone.
    """
    if count < 1:
        raise CheckpointError(f"--keep-last-n {count}: at least one checkpoint has to stay")
    others = [path for path in _latest_first(save_dir) if not path.is_symlink() and path != latest]
    for path in others[count - 1 :]:
        _delete(path)
    return others[count - 1 :]


def delete_step(save_dir: Path, iteration: int) -> None:
    """Delete the checkpoint of a step; a link, or a directory without manifest, is left alone."""
    path = save_dir / directory_name(iteration)
    if path in _latest_first(save_dir) and not path.is_symlink():
        _delete(path)


def _delete(path: Path) -> None:
    # A half-deleted directory must not look like a checkpoint.
    doomed = path.with_name(f".del-{path.name}-{process_id()}")
    os.rename(path, doomed)
    _remove(doomed)


def _remove(directory: Path) -> None:
    if directory.is_symlink():
        directory.unlink()
        return
    try:
        shutil.rmtree(directory)
    except OSError as error:
        warnings.warn(f"could not delete an old checkpoint: {explain(error)}", stacklevel=3)


def clean_stale(save_dir: Path) -> list[Path]:
    """Remove temporary directories of runs that no longer live.

    Whether a run on another host lives is unknown here: its directory goes when nothing has touched it for
    a day.
    """
    removed: list[Path] = []
    if not save_dir.is_dir():
        return removed
    for path in save_dir.iterdir():
        match = _TEMPORARY.match(path.name)
        if match is None or path.is_symlink():
            continue
        lives = owner_lives(match["owner"])
        if lives or (lives is None and is_recent(path.stat().st_mtime)):
            continue
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path)
    return removed


def owner_lives(owner: str) -> bool | None:
    """Return whether the process of a `process_id` lives; None where it belongs to another host."""
    host, pid, start = owner.rsplit("-", 2)
    return start_of(int(pid)) == int(start) if host == host_name() else None


def is_recent(touched: float) -> bool:
    """Return whether a run on another host may still write what it touched then (seconds since the epoch)."""
    return time.time() - touched < _FOREIGN_AGE_SECONDS


def process_id() -> str:
    """Return host, process and its start: what no two processes share that live at the same time."""
    return f"{host_name()}-{os.getpid()}-{max(start_of(os.getpid()), 0)}"


def find(
    load_dir: Path, step: int | None = None, *, accept_unpublished: bool = False
) -> FoundCheckpoint | None:
    """Choose the checkpoint to load.

    The tracker decides where the directory it names was published; otherwise the newest published one
    is taken, with a warning.

    Args:
        load_dir: the directory that holds checkpoints.
        step: this step and no other.
        accept_unpublished: also take a directory without manifest (written by another program).

    Returns:
        None when the directory holds no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints but none can be used, or the asked step is missing.
    """
    if not load_dir.is_dir():
        return None
    directories = {
        int(match[1]): path
        for path in load_dir.iterdir()
        if (match := PUBLISHED.match(path.name)) and path.is_dir()
    }
    published = sorted(number for number, path in directories.items() if (path / MANIFEST).is_file())
    if step is not None:
        return _found_step(load_dir, step, directories, published, accept_unpublished)
    named, problem = _read_tracker(load_dir / TRACKER)
    if named is not None:
        if named in published:
            path = _within(load_dir, directories[named])
            manifest = read_manifest(path)
            note = _later(load_dir, directories, named, published[-1])
            return FoundCheckpoint(path, manifest, note=note)
        if named in directories:
            refuse_older_format(directories[named])
            if accept_unpublished:
                return FoundCheckpoint(_within(load_dir, directories[named]), None)
        problem = (
            f"names step {named}, whose directory was never completed ({MANIFEST} is missing in it)"
            if named in directories
            else f"names step {named}, which has no directory"
        )
    elif not directories:
        refuse_without_step(load_dir, problem)
        return None
    if not published:
        refuse_older_format(directories[max(directories)])
        raise CheckpointError(
            f"--load {load_dir}: {TRACKER} {problem}, and no other complete checkpoint ({MANIFEST} inside) "
            "is there; if another program wrote them, --verify-checkpoint off accepts directories without one"
        )
    newest = published[-1]
    warning = f"{load_dir / TRACKER} {problem}; loading the newest complete checkpoint, step {newest}"
    path = _within(load_dir, directories[newest])
    return FoundCheckpoint(path, read_manifest(path), warning)


def _within(load_dir: Path, path: Path) -> Path:
    """Return a checkpoint of a folder; that folder may be a link, what lies in it may not lead elsewhere."""
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(load_dir)):
        raise CheckpointError(
            f"{path}: is a link to {real}, outside of the folder that was named, and is not followed; name "
            f"{real.parent} instead"
        )
    return path


def latest_step(save_dir: Path) -> int | None:
    """Return the step that the tracker of a folder names, or else its newest complete one; None for none."""
    if not save_dir.is_dir():
        return None
    steps = [step for path in save_dir.iterdir() if (step := iteration_of(path.name)) is not None]
    named, _ = _read_tracker(save_dir / TRACKER)
    if named in steps:
        return named
    return max(
        (step for step in steps if (save_dir / directory_name(step) / MANIFEST).is_file()), default=None
    )


def _later(load_dir: Path, directories: Mapping[int, Path], named: int, newest: int) -> str:
    """Return a note where the tracker names an older checkpoint than the one published last."""
    if newest <= named or _written(directories[newest]) <= _written(directories[named]):
        return ""
    return (
        f"{load_dir / TRACKER} names step {named}, but step {newest} was completed after it; if that is no "
        f"intention, --ckpt-step {newest} loads the later one"
    )


def _written(directory: Path) -> int:
    return (directory / MANIFEST).stat().st_mtime_ns


def find_of_job(save_dir: Path, job: str) -> FoundCheckpoint | None:
    """Find the checkpoint that a job published last, or None."""
    for path in _latest_first(save_dir) if save_dir.is_dir() else ():
        manifest = read_manifest(path)
        if manifest.job == job:
            return FoundCheckpoint(path, manifest)
    return None


def _latest_first(save_dir: Path) -> list[Path]:
    """Return the published directories, the one written last first."""
    published = [
        path for path in save_dir.iterdir() if PUBLISHED.match(path.name) and (path / MANIFEST).is_file()
    ]
    return sorted(published, key=lambda path: (_written(path), path.name), reverse=True)


def _found_step(
    load_dir: Path, step: int, directories: Mapping[int, Path], published: list[int], unpublished: bool
) -> FoundCheckpoint:
    if step in published:
        path = _within(load_dir, directories[step])
        return FoundCheckpoint(path, read_manifest(path))
    if step in directories:
        refuse_older_format(directories[step])
    if step in directories and unpublished:
        return FoundCheckpoint(_within(load_dir, directories[step]), None)
    state = f"was never completed ({MANIFEST} is missing in it)" if step in directories else "does not exist"
    steps = ", ".join(map(str, published)) or "none"
    raise CheckpointError(
        f"--ckpt-step {step}: {load_dir / directory_name(step)} {state}; complete ones in --load: {steps}"
    )


def _read_tracker(path: Path) -> tuple[int | None, str]:
    try:
        if path.exists() and not path.is_file():
            return None, "is no file"
        text = path.read_text().strip()
    except FileNotFoundError:
        return None, "is missing"
    except (OSError, UnicodeDecodeError) as error:
        return None, f"cannot be read ({error})"
    if text == RELEASE and (path.parent / RELEASE).is_symlink():
        # Converted weights have both names: Megatron-LM loads weights without a step by this one.
        step = iteration_of(os.readlink(path.parent / RELEASE))
        if step is not None:
            return step, ""
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        return None, f"holds {text[:40]!r} instead of a step number"
    return int(text), ""


def sync_directory(path: Path) -> None:
    """Force a directory's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_files(paths: Iterable[Path]) -> None:
    """Force the contents of files to disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def write_synced(path: Path, content: str | memoryview) -> None:
    """Write a file, text in UTF-8, and force it to disk."""
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())

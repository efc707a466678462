"""Publishing of checkpoint directories: all at once, at the very end, whatever interrupts it.

A checkpoint is written into a temporary directory, described by a manifest (sizes, SHA-256 of every file),
forced to disk and renamed; only then does the tracker name it. This module knows files and directories, not
tensors, ranks or torch, so that every crash point can be tested in one process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.tracker import TRACKER
from mindspeed_train.checkpoint import manifest_fields
from mindspeed_train.checkpoint.fields import Fields
from mindspeed_train.checkpoint.older_formats import RELEASE, refuse_older_format, refuse_without_step
from mindspeed_train.checkpoint.opened_files import (
    inside,
    parse_json,
    read_inside,
    shown_path,
)
from mindspeed_train.checkpoint.os_errors import explain
from mindspeed_train.checkpoint.processes import host_name, start_of

MANIFEST = "manifest.json"
FORMAT = "mindspeed-checkpoint-1"

_PUBLISHED = re.compile(r"iter_(\d{7,})\Z")
_TEMPORARY = re.compile(r"\.(?:tmp|del)-iter_\d{7,}-(?P<owner>.+-\d+-\d+)\Z")
_CHUNK = 1 << 22
_FOREIGN_AGE_SECONDS = 24 * 3600
_DIGEST = "digest"
MOST_STEPS = 1 << 31
"""Steps that a run may have done."""


@dataclass(frozen=True)
class Manifest:
    """The description of a published checkpoint.

    Attributes:
        iteration: training steps done.
        files: ``{name: (bytes, sha256)}`` of every file except the manifest.
        plan: the plan the checkpoint was written with, as `Plan.as_dict` gives it.
        versions: versions of the libraries that wrote it.
        layout: sizes of the parallel dimensions it was written with.
        model: the arguments that determine the shapes of the model.
        features: features whose own state is inside.
        job: the job that wrote it, the same over its restarts; empty where nobody restarts it.
        data: the identity of the training data, as `data.identity.record_of` gives it; empty for others than
            files.
        format: the version of this description.
        sealed: whether its own text was proven unchanged by the digest it carries, so that it is a file that
            changed where the two differ; not written.
    """

    iteration: int
    files: Mapping[str, tuple[int, str]]
    plan: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, int] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    job: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    format: str = FORMAT
    sealed: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Found:
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


def directory_name(iteration: int) -> str:
    """Return the name of a published checkpoint, as Megatron-LM spells it."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """Return the step in the name of a published checkpoint; None for any other name."""
    match = _PUBLISHED.match(name)
    return int(match[1]) if match else None


def temporary_name(iteration: int, process: str = "") -> str:
    """Return the name of a checkpoint that is being written.

    Args:
        iteration: training steps done.
        process: `process_id` of who begins and publishes it; this process by default.
    """
    return f".tmp-{directory_name(iteration)}-{process or process_id()}"


def digest_file(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a file."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


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


def describe(manifest: Manifest) -> str:
    """Return the text of a manifest, with the digest of everything else in it."""
    description = json.loads(json.dumps(asdict(manifest), default=str))
    description.pop("sealed")
    description[_DIGEST] = _digest_of(description)
    return json.dumps(description, indent=1, sort_keys=True) + "\n"


def _digest_of(description: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in description.items() if name != _DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


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


def find(load_dir: Path, step: int | None = None, *, accept_unpublished: bool = False) -> Found | None:
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
        if (match := _PUBLISHED.match(path.name)) and path.is_dir()
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
            return Found(path, manifest, note=note)
        if named in directories:
            refuse_older_format(directories[named])
            if accept_unpublished:
                return Found(_within(load_dir, directories[named]), None)
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
    return Found(path, read_manifest(path), warning)


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


def find_of_job(save_dir: Path, job: str) -> Found | None:
    """Find the checkpoint that a job published last, or None."""
    for path in _latest_first(save_dir) if save_dir.is_dir() else ():
        manifest = read_manifest(path)
        if manifest.job == job:
            return Found(path, manifest)
    return None


def _latest_first(save_dir: Path) -> list[Path]:
    """Return the published directories, the one written last first."""
    published = [
        path for path in save_dir.iterdir() if _PUBLISHED.match(path.name) and (path / MANIFEST).is_file()
    ]
    return sorted(published, key=lambda path: (_written(path), path.name), reverse=True)


def _found_step(
    load_dir: Path, step: int, directories: Mapping[int, Path], published: list[int], unpublished: bool
) -> Found:
    if step in published:
        path = _within(load_dir, directories[step])
        return Found(path, read_manifest(path))
    if step in directories:
        refuse_older_format(directories[step])
    if step in directories and unpublished:
        return Found(_within(load_dir, directories[step]), None)
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


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: it is damaged, or of an unknown format.
    """
    path = directory / MANIFEST
    manifest = parse_manifest(read_inside(directory, MANIFEST), path)
    step = iteration_of(directory.name)
    if step not in (None, manifest.iteration):
        raise CheckpointError(
            f"{path}: is that of step {manifest.iteration}, and its folder says {step}; choose another "
            "checkpoint with --ckpt-step"
        )
    return manifest


def parse_manifest(content: bytes, path: Path | str) -> Manifest:
    """Return what the text of a manifest says; ``path`` names it in messages.

    Raises:
        CheckpointError: it is damaged, or of an unknown format.
    """
    try:
        data = parse_json(content, path)
        root = Fields(path, data)
        if root.text("format") != FORMAT:
            raise CheckpointError(
                f"{path}: format {root.text('format')!r}, this version reads {FORMAT!r}; use the version "
                "that wrote it, or choose another checkpoint with --ckpt-step"
            )
        # Versions before the digest wrote none.
        rest = {name: value for name, value in data.items() if name != _DIGEST}
        own = data.get(_DIGEST)
        if own not in (None, _digest_of(rest)):
            raise CheckpointError(
                f"{path}: its own text changed since it was written (its digest differs), so what it says of "
                "the files cannot be trusted; choose another checkpoint with --ckpt-step"
            )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(_damaged(path, error)) from error
    unknown = rest.keys() - {each.name for each in fields(Manifest)}
    if unknown:
        root.refuse(min(unknown), rest[min(unknown)], "left out, since this version does not know it")
    return Manifest(
        iteration=root.integer("iteration", 0, MOST_STEPS),
        files=manifest_fields.files(root),
        plan=manifest_fields.plan(root),
        versions=manifest_fields.texts(root.child("versions", {})),
        layout=manifest_fields.sizes(root.child("layout", {})),
        model=manifest_fields.plain(root.child("model", {})),
        features=tuple(root.items("features", str, [])),
        job=root.text("job", ""),
        data=manifest_fields.data(root),
        sealed=own is not None,
    )


def _damaged(path: Path | str, error: Exception) -> str:
    return f"{path}: damaged ({type(error).__name__}: {error}); choose another checkpoint with --ckpt-step"


def check_files(
    directory: Path, manifest: Manifest, names: Iterable[str], *, contents: bool
) -> Iterator[str]:
    """Compare files with the manifest; yield what is wrong with each, or perhaps with the manifest.

    Args:
        directory: the checkpoint.
        manifest: its description.
        names: files of it.
        contents: compare hashes too, not only sizes.
    """
    for name in names:
        problem = _difference(directory, name, *manifest.files[name], contents=contents)
        if problem and not manifest.sealed:
            # The text of a manifest without digest proves nothing.
            problem += f"; it or {directory / MANIFEST} was damaged, which cannot be told apart"
        if problem:
            yield problem


def _difference(directory: Path, name: str, size: int, digest: str, *, contents: bool) -> str:
    path: Path | str = directory / name
    try:
        path, real = shown_path(directory, name), inside(directory, name)
        status = real.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{path}: is no file"
        if status.st_size != size:
            return f"{path}: {status.st_size} bytes, the manifest says {size} (truncated or overwritten)"
        if contents and digest_file(real)[1] != digest:
            return f"{path}: the contents changed since it was written (SHA-256 differs from the manifest)"
    except CheckpointError as error:
        return str(error)
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return f"{path}: {explain(error)}"
    return ""


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

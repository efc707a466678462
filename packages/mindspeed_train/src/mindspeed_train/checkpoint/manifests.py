"""The manifest of a checkpoint: what a complete one consists of, and whether its files are those."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.tracker import iteration_of
from mindspeed_train.checkpoint import manifest_fields
from mindspeed_train.checkpoint.fields import Fields
from mindspeed_train.checkpoint.opened_files import inside, parse_json, read_inside, shown_path
from mindspeed_train.checkpoint.os_errors import explain

MANIFEST = "manifest.json"
FORMAT = "mindspeed-checkpoint-1"
_CHUNK = 1 << 22
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


def digest_file(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a file."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def describe(manifest: Manifest) -> str:
    """Return the text of a manifest, with the digest of everything else in it."""
    description = json.loads(json.dumps(asdict(manifest), default=str))
    description.pop("sealed")
    description[_DIGEST] = _digest_of(description)
    return json.dumps(description, indent=1, sort_keys=True) + "\n"


def _digest_of(description: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in description.items() if name != _DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


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

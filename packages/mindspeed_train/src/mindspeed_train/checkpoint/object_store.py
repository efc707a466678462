"""Publishing of checkpoints in an object store: the manifest is written last and alone makes them visible.

A store has no rename and no fsync, but it replaces one object whole. So the files of a save go under a name
of their own, ``iter_0000100/TIME-OWNER/``, which nobody reads; then ``iter_0000100/manifest.json`` lists
them, and then the tracker names the step. A save that ends early leaves what was published as it was, also
one that repeats a published step. The counterpart of `publish` for drivers of fsspec.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.tracker import directory_name, iteration_of
from mindspeed_train.checkpoint import manifests, publish
from mindspeed_train.checkpoint.store_steps import SAVE, TIME, Step, may_be_written, owner, reason_of, started
from mindspeed_train.checkpoint.store_url import protocol_of

logger = logging.getLogger("mindspeed_core")


class ObjectStore:
    """The checkpoints under one prefix of an object store.

    Every method opens the driver in the process that calls it, and raises `CheckpointError` with the URL and
    the driver's reason where the store refuses.
    """

    def __init__(self, url: str) -> None:
        """Describe the prefix; nothing is asked of the store yet."""
        self.url = url.rstrip("/")

    # Writing

    def begin(self, iteration: int) -> str:
        """Return the prefix, below the store's own, that receives the files of a new save."""
        now = datetime.now(timezone.utc).strftime(TIME)
        return f"{directory_name(iteration)}/{now}-{publish.process_id()}"

    def describe_upload(self, save: str) -> dict[str, str]:
        """Describe to another process where a save goes; a plugin may have registered the driver."""
        driver = type(self._open()[0])
        return {"url": self.url, "save": save, "driver": f"{driver.__module__}:{driver.__qualname__}"}

    @classmethod
    def of_upload(cls, upload: Mapping[str, str]) -> ObjectStore:
        """Return the store of `describe_upload`, with its driver registered in this process."""
        from fsspec import register_implementation

        register_implementation(protocol_of(upload["url"]), upload["driver"], clobber=True)
        return cls(upload["url"])

    def upload(self, save: str, files: Iterable[Path], beat: Callable[[], None] = lambda: None) -> None:
        """Write files under the prefix of a save; ``beat`` is called whenever the driver got further."""
        from fsspec.callbacks import Callback

        class Beats(Callback):
            def call(self, *names: Any, **values: Any) -> None:
                beat()

        def put(path: Path, fs: Any, remote: str) -> None:
            fs.put_file(str(path), remote, callback=Beats())

        for path in files:
            with self._explained(f"{save}/{path.name}"):
                self._put(f"{save}/{path.name}", partial(put, path))
            beat()

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the objects directly under a prefix, with their sizes in bytes."""
        return {name: size for name, (size, is_folder) in self._children(prefix).items() if not is_folder}

    def publish_save(self, save: str, manifest: manifests.Manifest) -> None:
        """Make a completely uploaded save visible and the latest.

        Raises:
            CheckpointError: an object is missing or has another size; nothing was published.
        """
        sizes = self.sizes(save)
        for name, (size, _) in manifest.files.items():
            if name not in sizes:
                raise CheckpointError(f"{self.url}/{save}/{name}: was written, but is not in the store")
            if sizes[name] != size:
                raise CheckpointError(
                    f"{self.url}/{save}/{name}: has {sizes[name]} bytes in the store, {size} were written"
                )
        folder, _, own = save.partition("/")
        files = {f"{own}/{name}": entry for name, entry in manifest.files.items()}
        self._write(
            f"{folder}/{manifests.MANIFEST}", manifests.describe(replace(manifest, files=files)).encode()
        )
        self._write(publish.TRACKER, str(manifest.iteration).encode())
        with self._spared(f"{folder}: objects that were replaced stay"):
            for name in self._step(folder).saves:
                if name != own and (owner(name) == publish.process_id() or not may_be_written(name)):
                    self._remove(f"{folder}/{name}", whole=True)

    def abandon(self, save: str) -> None:
        """Remove the objects of a save that failed, unless its manifest is visible: then it is complete."""
        folder, _, own = save.partition("/")
        with self._spared(f"{save}: objects of a failed save stay"):
            if own not in self._referred(self._step(folder)):
                self._remove(save, whole=True)

    def keep_last(self, count: int, latest: int) -> None:
        """Delete all but the ``count`` checkpoints written last, never the step ``latest``.

        What somebody copied into the store by other means is left alone.
        """
        with self._spared("old checkpoints stay"):
            written = []
            for step in self._steps().values():
                if step.published and step.iteration != latest:
                    written += [(save, step) for save in self._referred(step)]
            for save, step in sorted(written, key=lambda entry: entry[0], reverse=True)[count - 1 :]:
                # What is half deleted must not look like a checkpoint.
                self._remove(f"{step.name}/{manifests.MANIFEST}")
                self._remove(f"{step.name}/{save}", whole=True)

    def latest_step(self) -> int | None:
        """Return the step that the tracker names; None where it names none."""
        tracker = (self._read(publish.TRACKER) or b"").decode("ascii", "replace").strip()
        return int(tracker) if tracker.isdigit() else None

    def delete_step(self, iteration: int) -> None:
        """Delete the checkpoint of a step."""
        with self._spared("an old checkpoint stays"):
            for step in self._steps().values():
                if step.published and step.iteration == iteration:
                    saves = self._referred(step)
                    self._remove(f"{step.name}/{manifests.MANIFEST}")
                    for save in saves:
                        self._remove(f"{step.name}/{save}", whole=True)

    def clean_stale(self) -> list[str]:
        """Remove the objects of saves whose runs no longer live; those of another host after a day."""
        removed = []
        for step in self._steps().values():
            if step.published and len(step.saves) < 2:
                continue
            stale = [name for name in step.saves if not may_be_written(name)]
            if not stale:
                continue
            with self._spared(f"{step.name}: objects of saves that ended early stay"):
                referred = self._referred(step)
                for name in stale:
                    if name not in referred:
                        self._remove(f"{step.name}/{name}", whole=True)
                        removed.append(f"{step.name}/{name}")
        return removed

    def check_writable(self) -> None:
        """Write a small object, read it back and remove it."""
        name = f".write-check-{publish.process_id()}"
        self._write(name, b"mindspeed-core: may be deleted\n")
        with self._spared("old checkpoints and those of failed saves stay"):
            self._remove(name)

    # Reading

    def find(
        self, step: int | None = None, *, accept_unpublished: bool = False
    ) -> publish.FoundCheckpoint | None:
        """Choose the checkpoint to load, by the rules of `publish.find`."""
        steps = self._steps()
        tracker = self._read(publish.TRACKER)
        published = [number for number, entry in steps.items() if entry.published]
        with tempfile.TemporaryDirectory(prefix="mindspeed-index-") as directory:
            # The same rules over the same names; only what can be chosen is read.
            index = Path(directory)
            for number, entry in steps.items():
                if not entry.published and not entry.files:
                    # A save under way, or one that ended early.
                    continue
                (index / entry.name).mkdir()
                if entry.published:
                    chosen = number == step or number == max(published) or tracker == str(number).encode()
                    content = self._text(f"{entry.name}/{manifests.MANIFEST}") if chosen else b""
                    (index / entry.name / manifests.MANIFEST).write_bytes(content)
                    written = max(map(started, entry.saves), default=0.0)
                    os.utime(index / entry.name / manifests.MANIFEST, (written, written))
            if tracker is not None:
                (index / publish.TRACKER).write_bytes(tracker)
            try:
                found = publish.find(index, step, accept_unpublished=accept_unpublished)
            except CheckpointError as error:
                raise CheckpointError(str(error).replace(directory, self.url)) from error
            if found is None:
                return None
            return replace(
                found,
                path=Path(found.path.name),
                warning=found.warning.replace(directory, self.url),
                note=found.note.replace(directory, self.url),
                url=f"{self.url}/{found.path.name}",
            )

    def find_of_job(self, job: str) -> publish.FoundCheckpoint | None:
        """Find the checkpoint that a job published last, or None."""
        tracker = self._read(publish.TRACKER)
        published = [step for step in self._steps().values() if step.published]

        def recency(step: Step) -> tuple[bool, str, int]:
            return tracker == str(step.iteration).encode(), max(step.saves, default=""), step.iteration

        for step in sorted(published, key=recency, reverse=True):
            content = self._text(f"{step.name}/{manifests.MANIFEST}")
            url = f"{self.url}/{step.name}"
            try:
                manifest = manifests.parse_manifest(content, f"{url}/{manifests.MANIFEST}")
            except CheckpointError as error:
                # A server of files, unlike a store of objects, can be left with a part of it.
                logger.warning("%s; the job continues from the one before", error)
                continue
            if manifest.job == job:
                return publish.FoundCheckpoint(Path(step.name), manifest, url=url)
        return None

    def manifest(self, prefix: str = "") -> manifests.Manifest | None:
        """Return the manifest directly under a prefix, or None."""
        name = f"{prefix}/{manifests.MANIFEST}".lstrip("/")
        content = self._read(name)
        return None if content is None else manifests.parse_manifest(content, f"{self.url}/{name}")

    def published(self) -> list[str]:
        """Return the names of the published checkpoints."""
        return [step.name for _, step in sorted(self._steps().items()) if step.published]

    def download(self, name: str, target: Path) -> None:
        """Copy an object into a file."""
        with self._explained(name):
            fs, root = self._open()
            fs.get_file(f"{root}/{name}", str(target))

    # The driver

    def _open(self) -> tuple[Any, str]:
        """Return the driver and this prefix in its spelling; lists it has remembered are dropped."""
        from fsspec.core import url_to_fs

        fs, root = url_to_fs(self.url)
        fs.invalidate_cache()
        return fs, str(root).rstrip("/")

    @contextmanager
    def _explained(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            where = f"{self.url}/{name}".rstrip("/")
            raise CheckpointError(f"{where}: {reason_of(error)}") from error

    @contextmanager
    def _spared(self, doing: str) -> Iterator[None]:
        """Warn where the store refuses to clear away what nobody reads."""
        try:
            yield
        except CheckpointError as error:
            logger.warning("%s/%s (%s)", self.url, doing, error)

    def _children(self, prefix: str) -> dict[str, tuple[int, bool]]:
        """Return what is directly under a prefix: ``{name: (bytes, whether it is a folder)}``."""
        with self._explained(prefix):
            fs, root = self._open()
            path = f"{root}/{prefix}".rstrip("/")
            try:
                # Not `find`, which takes a list that is refused for an empty one.
                listed = fs.ls(path, detail=True)
            except FileNotFoundError:
                return {}
            found = {}
            for entry in listed:
                name = str(entry["name"]).rstrip("/")
                if name != path:
                    found[name.rpartition("/")[2]] = (int(entry["size"] or 0), entry["type"] == "directory")
            return found

    def _step(self, folder: str) -> Step:
        children = self._children(folder)
        files = {name: size for name, (size, is_folder) in children.items() if not is_folder}
        saves = sorted(name for name, (_, is_folder) in children.items() if is_folder and SAVE.match(name))
        iteration = iteration_of(folder)
        assert iteration is not None
        return Step(iteration, files, tuple(saves))

    def _steps(self) -> dict[int, Step]:
        names = [name for name, (_, is_folder) in self._children("").items() if is_folder]
        steps = [self._step(name) for name in names if iteration_of(name) is not None]
        return {step.iteration: step for step in steps}

    def _referred(self, step: Step) -> set[str]:
        """Return the saves that the manifest of a step lists files of."""
        manifest = self.manifest(step.name)
        return (
            set() if manifest is None else {name.partition("/")[0] for name in manifest.files if "/" in name}
        )

    def _put(self, name: str, write: Any) -> None:
        fs, root = self._open()
        remote = f"{root}/{name}"
        try:
            write(fs, remote)
        except FileNotFoundError:
            # Servers of files need the folder; a bucket that does not exist is not made.
            top = remote[: len(remote) - len(remote.lstrip("/"))] + remote.lstrip("/").partition("/")[0]
            if not fs.exists(top):
                raise
            fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
            write(fs, remote)

    def _read(self, name: str) -> bytes | None:
        with self._explained(name):
            fs, root = self._open()
            try:
                return bytes(fs.cat_file(f"{root}/{name}"))
            except FileNotFoundError:
                return None

    def _text(self, name: str) -> bytes:
        content = self._read(name)
        if content is None:
            raise CheckpointError(f"{self.url}/{name}: was deleted meanwhile")
        return content

    def _write(self, name: str, content: bytes) -> None:
        """Replace a small object and read it back; restore what it was where it is not what was written."""
        before = self._read(name)
        failure: CheckpointError | None = None
        try:
            with self._explained(name):
                self._put(name, lambda fs, remote: fs.pipe_file(remote, content))
        except CheckpointError as error:
            # The answer may be lost where the object is not.
            failure = error
        try:
            after = self._read(name)
        except CheckpointError:
            if failure is not None:
                raise failure from None
            # Taken without complaint, and the answer to a question about it is no reason to doubt that.
            return
        if after == content:
            return
        if after != before:
            if before is None:
                self._remove(name)
            else:
                with self._explained(name):
                    self._put(name, lambda fs, remote: fs.pipe_file(remote, before))
        raise failure or CheckpointError(
            f"{self.url}/{name}: the store keeps something else than was written"
        )

    def _remove(self, name: str, *, whole: bool = False) -> None:
        """Remove an object, or everything under a prefix."""
        with self._explained(name):
            fs, root = self._open()
            with suppress(FileNotFoundError):
                fs.rm(f"{root}/{name}", recursive=whole)

"""Drivers of fsspec for tests: an object store in a folder, seen by all processes, that fails when told to.

Objects are written whole or not at all; there are no folders, no rename and no append.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from urllib.parse import quote, unquote

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

FOLDER = "MINDSPEED_TEST_OBJECTS"


class Crash(BaseException):
    """The end of a process, as far as a test in one process can have it."""


class Faults:
    """The operation that fails, counted from 1, and how; processes that this one starts follow it."""

    count = 0
    at: int | None = None
    how = ""
    operations: tuple[str, ...] = ()
    seen: list[str] = []
    followed = ""
    orders = 0

    @classmethod
    def set(cls, at=None, how="", operations=()):
        cls.count, cls.at, cls.how, cls.operations, cls.seen = 0, at, how, operations, []
        cls.orders += 1
        if FOLDER in os.environ:
            cls._orders_of(os.getpid()).write_text(json.dumps([cls.orders, at, how, operations]))

    @staticmethod
    def _orders_of(process):
        return Path(f"{os.environ[FOLDER]}-faults-{process}")

    @classmethod
    def follow(cls):
        """Take over what the process that started this one has set, unless this one sets its own."""
        orders = cls._orders_of(os.getppid())
        if cls._orders_of(os.getpid()).exists() or not orders.exists():
            return
        text = orders.read_text()
        if text != cls.followed:
            cls.followed, cls.count = text, 0
            _, cls.at, cls.how, cls.operations = json.loads(text)


def operation(function):
    def run(self, path, *args, **named):
        name = function.__name__
        Faults.follow()
        if Faults.operations and name not in Faults.operations:
            return function(self, path, *args, **named)
        Faults.count += 1
        Faults.seen.append(f"{name} {path}")
        due = Faults.at is not None and (
            Faults.count == Faults.at or (Faults.how == "outage" and Faults.count > Faults.at)
        )
        if not due:
            return function(self, path, *args, **named)
        if Faults.how in ("error", "outage"):
            raise OSError(errno.EIO, "the store does not answer")
        if Faults.how == "permission":
            raise PermissionError("403 Forbidden: s3://user:geheim@bucket?token=geheim")
        if Faults.how == "foreign error":
            raise RuntimeError("HTTP 503\nsecond line")
        if Faults.how == "crash":
            raise Crash
        if Faults.how.startswith("truncate"):
            if name not in ("put_file", "pipe_file"):
                return function(self, path, *args, **named)
            self.truncated = True
        function(self, path, *args, **named)
        self.truncated = False
        if Faults.how == "crash after":
            raise Crash
        if Faults.how in ("error after", "truncate and error"):
            raise OSError(errno.EIO, "the answer is lost")
        return None

    return run


class Objects(AbstractFileSystem):
    """``objects://bucket/key``; buckets exist, folders do not."""

    protocol = "objects"
    cachable = False
    truncated = False

    @staticmethod
    def _file(path):
        return Path(os.environ[FOLDER]) / quote(Objects._strip_protocol(path), safe="")

    def _store(self, path, content):
        file = self._file(path)
        if self.truncated:
            content = content[: len(content) // 2]
        beside = file.with_name(f"+{os.getpid()}")
        beside.write_bytes(content)
        os.replace(beside, file)

    @operation
    def ls(self, path, detail=True, **named):
        prefix = self._strip_protocol(path)
        found = {}
        for file in Path(os.environ[FOLDER]).iterdir():
            key = unquote(file.name)
            if key == prefix:
                found[key] = {"name": key, "size": file.stat().st_size, "type": "file"}
            elif key.startswith(f"{prefix}/"):
                child, more, _ = key[len(prefix) + 1 :].partition("/")
                name = f"{prefix}/{child}"
                kind = "directory" if more else "file"
                found[name] = {"name": name, "size": 0 if more else file.stat().st_size, "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    @operation
    def cat_file(self, path, **named):
        return self._file(path).read_bytes()

    @operation
    def pipe_file(self, path, value, **named):
        self._store(path, value)

    @operation
    def put_file(self, path, remote, **named):
        self._store(remote, Path(path).read_bytes())

    @operation
    def get_file(self, path, target, **named):
        shutil.copyfile(self._file(path), target)

    @operation
    def rm(self, path, recursive=False, **named):
        prefix = self._strip_protocol(path)
        keys = [unquote(file.name) for file in Path(os.environ[FOLDER]).iterdir()]
        gone = [key for key in keys if key == prefix or (recursive and key.startswith(f"{prefix}/"))]
        if not gone:
            raise FileNotFoundError(path)
        for key in gone:
            self._file(key).unlink()

    def _refuse(self, *args, **named):
        raise NotImplementedError("an object store has no such operation")

    mkdir = makedirs = mv = mv_file = rename = rmdir = _open = open = touch = _refuse


class FileServer(DirFileSystem):
    """``fileserver://share/path``: real folders below the test's own, which have to be made first."""

    protocol = "fileserver"
    cachable = False

    def __init__(self, **named):
        super().__init__(path=f"{os.environ[FOLDER]}-server", fs=LocalFileSystem(), **named)

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("fileserver://").rstrip("/")


fsspec.register_implementation("objects", Objects, clobber=True)
fsspec.register_implementation("fileserver", FileServer, clobber=True)


def names():
    """Return the names of all objects."""
    return sorted(unquote(file.name) for file in Path(os.environ[FOLDER]).iterdir())


def make_folder(folder):
    """Keep the objects of this process and of those it starts in a folder."""
    os.environ[FOLDER] = str(folder)
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(f"{folder}-server", "share").mkdir(parents=True, exist_ok=True)
    Faults.set()

"""The index cache: built once, shared by jobs at the same time, repaired after a kill."""

from __future__ import annotations

import fcntl
import pickle
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_core.errors import DataError
from mindspeed_train.data import index_cache
from mindspeed_train.data.index_cache import is_complete, through_cache

ARRAYS = ("one.npy", "two.npy")
STEM = "hash-"


class Index:
    """Stands for megatron-core: loads what is complete in ``path_to_cache``, else writes it."""

    def __init__(self, fail_after=None):
        self.config = SimpleNamespace(path_to_cache="given")
        self.folders, self.built, self.fail_after = [], 0, fail_after

    def __call__(self):
        from pathlib import Path

        folder = Path(self.config.path_to_cache)
        self.folders.append(folder)
        if is_complete(folder, STEM, ARRAYS):
            return [np.load(folder / f"{STEM}{name}").tolist() for name in ARRAYS]
        self.built += 1
        (folder / f"{STEM}description.txt").write_text("what it is")
        for position, name in enumerate(ARRAYS):
            if position == self.fail_after:
                raise KeyboardInterrupt
            np.save(folder / f"{STEM}{name}", np.arange(1000))
        return [np.arange(1000).tolist()] * 2


def index(folder, build):
    return through_cache(build.config, folder, STEM, ARRAYS, build)


def test_the_second_job_loads_what_the_first_built(tmp_path):
    first, second = Index(), Index()
    assert index(tmp_path / "cache", first) == index(tmp_path / "cache", second)
    assert (first.built, second.built) == (1, 0)
    assert first.config.path_to_cache == "given"


def test_nothing_appears_under_its_final_name_before_it_is_complete(tmp_path):
    build = Index(fail_after=1)
    with pytest.raises(KeyboardInterrupt):
        index(tmp_path, build)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_what_a_killed_job_left_is_removed(tmp_path):
    (tmp_path / ".building-dead").mkdir()
    (tmp_path / ".building-dead" / "part").write_text("x")
    index(tmp_path, Index())
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock",
        *(f"{STEM}{name}" for name in (*ARRAYS, "digests.json", "description.txt")),
    }


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_index_is_built_again(tmp_path, damage):
    index(tmp_path, Index())
    file = tmp_path / f"{STEM}two.npy"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:400])
    else:
        file.unlink()
    again = Index()
    index(tmp_path, again)
    assert again.built == 1
    assert is_complete(tmp_path, STEM, ARRAYS)


def test_a_second_job_waits_for_the_first_and_builds_nothing(tmp_path):
    build = Index()
    with ThreadPoolExecutor(1) as pool, (tmp_path / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = pool.submit(index, tmp_path, build)
        with pytest.raises(StillWaiting):
            waiting.result(timeout=0.2)
        index_files = Index()
        index_files.config.path_to_cache = str(tmp_path)
        index_files()
        fcntl.flock(lock, fcntl.LOCK_UN)
        waiting.result(timeout=30)
    assert build.built == 0


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError("no locks available")

    monkeypatch.setattr(index_cache.fcntl, "flock", refuse)
    (tmp_path / ".building-other").mkdir()
    assert len(index(tmp_path, Index())) == 2
    # Without the lock nobody knows whether the other job is alive.
    assert (tmp_path / ".building-other").is_dir()


def test_a_rank_that_does_not_build_reports_a_missing_index(tmp_path, monkeypatch):
    monkeypatch.setattr(index_cache, "dist", SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: 1))
    build = Index()
    index(tmp_path, build)
    assert build.folders == [tmp_path]


class Attack:
    def __reduce__(self):
        return ran.append, ("attack",)


ran: list[str] = []


def put_pickle(path):
    path.write_bytes(pickle.dumps(Attack()))


def put_objects(path):
    np.save(path, np.array([Attack()], dtype=object), allow_pickle=True)


def put_archive(path):
    with path.open("wb") as file:
        np.savez(file, a=np.arange(3))


def put_floats(path):
    np.save(path, np.ones(3))


@pytest.mark.parametrize("put", [put_pickle, put_objects, put_archive, put_floats])
def test_what_is_no_array_of_integers_is_refused_by_name_and_not_unpickled(tmp_path, put):
    index(tmp_path, Index())
    put(tmp_path / f"{STEM}two.npy")
    with pytest.raises(DataError, match=r"hash-two\.npy: .*delete it"):
        index(tmp_path, Index())
    assert ran == []


def test_megatron_core_maps_arrays_through_the_same_function(tmp_path):
    put_pickle(tmp_path / "forged.npy")

    def build():
        return np.load(tmp_path / "forged.npy", allow_pickle=True)

    with pytest.raises(DataError, match=r"forged\.npy"):
        index_cache._with_cache(SimpleNamespace(path_to_cache=None), tmp_path, build)
    assert ran == []
    assert np.load.__module__ == "numpy"

"""In an object store, too, a checkpoint is visible only when it is complete, whatever fails meanwhile."""

from __future__ import annotations

import itertools

import object_store_driver as driver
import pytest
from object_store_driver import Crash, Faults

from mindspeed_core.errors import CheckpointError
from mindspeed_core.hosts.standalone.checkpoint import publish, staged_files
from mindspeed_core.hosts.standalone.checkpoint.object_store import ObjectStore

URL = "objects://bucket/run"
HOWS = (
    *("error", "error after", "permission", "foreign error", "outage"),
    *("truncate", "truncate and error", "crash", "crash after"),
)


@pytest.fixture
def objects(tmp_path, monkeypatch):
    monkeypatch.setenv(driver.FOLDER, "")
    driver.make_folder(tmp_path / "objects")
    yield tmp_path
    Faults.set()


def save(folder, iteration, text="weights", keep=None, url=URL, job=""):
    """Save as a run does: upload shards, then the rest, then publish; remove what a failed save wrote."""
    store = ObjectStore(url)
    name = store.begin(iteration)
    files = []
    for file in ("__0_0.distcp", "common.pt"):
        path = folder / file
        path.write_text(f"{text} {iteration} {file}")
        files.append(path)
    manifest = publish.Manifest(
        iteration=iteration, files={path.name: publish.digest_file(path) for path in files}, job=job
    )
    try:
        store.upload(name, files)
        store.publish_save(name, manifest)
    except CheckpointError:
        store.abandon(name)
        raise
    if keep is not None:
        store.keep_last(keep, iteration)


def contents(folder, name, url=URL):
    """Download a published checkpoint, compare it with its manifest, and return its text."""
    store = ObjectStore(url)
    target = folder / "download"
    target.mkdir(exist_ok=True)
    for file in staged_files.stored_files(store, name, store.manifest(name)):
        staged_files.download(store, name, file, target, contents=True)
    return (target / "__0_0.distcp").read_text()


def referred(url=URL):
    """The objects that a reader can see: tracker, manifests and what they list."""
    store, prefix = ObjectStore(url), url.partition("://")[2]
    tracker = f"{prefix}/{publish.TRACKER}"
    seen = {tracker} & set(driver.names())
    for name in store.published():
        seen.add(f"{prefix}/{name}/{publish.MANIFEST}")
        seen.update(f"{prefix}/{name}/{file}" for file in store.manifest(name).files)
    return sorted(seen)


def test_what_was_saved_is_found_and_complete(objects):
    save(objects, 1)
    save(objects, 2)
    found = ObjectStore(URL).find()
    assert (found.manifest.iteration, found.warning, found.url) == (2, "", f"{URL}/iter_0000002")
    assert contents(objects, "iter_0000001") == "weights 1 __0_0.distcp"
    assert driver.names() == referred()


SCENARIOS = {
    "first": (None, 1, None),
    "next": (1, 2, None),
    "repeated": (2, 2, None),
    "rotated": (1, 2, 1),
}


def operations_of(folder, scenario):
    """How many operations a save takes that nothing disturbs."""
    before, step, keep = SCENARIOS[scenario]
    driver.make_folder(folder / "undisturbed")
    if before:
        save(folder, before, "old")
    Faults.set()
    save(folder, step, "new", keep)
    return Faults.count


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("how", HOWS)
def test_no_failing_operation_shows_anything_but_complete_checkpoints(objects, monkeypatch, scenario, how):
    before, step, keep = SCENARIOS[scenario]
    number = itertools.count()
    outcomes, said = set(), []
    for at in range(1, operations_of(objects, scenario) + 4):
        driver.make_folder(objects / f"objects-{at}")
        monkeypatch.setattr(publish, "process_id", lambda: f"{publish._host()}-{10**8 + next(number)}-1")
        if before:
            save(objects, before, "old")
        Faults.set(at, how)
        try:
            save(objects, step, "new", keep)
            outcome = "saved"
        except (CheckpointError, Crash) as error:
            outcome = type(error).__name__
            said.append(str(error))
        Faults.set()
        outcomes.add(outcome)
        where = f"{how} at operation {at}: {outcome}"
        store = ObjectStore(URL)
        found = store.find()
        for name in store.published():
            assert contents(objects, name).split()[1] == str(int(name[5:])), where
        latest = None if found is None else contents(objects, found.url.rpartition("/")[2]).split()[:2]
        old = [["old", str(before)]] if before else [None]
        new = [["new", str(step)]]
        # Between manifest and tracker a step is seen that no other one is named before.
        unclear = new if scenario in ("first", "repeated") else []
        assert latest in {"saved": new, "CheckpointError": old + unclear, "Crash": old + new}[outcome], where
        assert found is None or not found.warning or scenario == "first", where
        # The next start clears away what is left, and the next save is found.
        store.clean_stale()
        if how not in ("outage", "error", "permission", "foreign error") or keep is None:
            assert driver.names() == referred(), where
        save(objects, 7, "later")
        assert store.find().manifest.iteration == 7, where
    assert "geheim" not in "".join(said)
    assert outcomes == {"saved", "Crash"} if "crash" in how else "saved" in outcomes

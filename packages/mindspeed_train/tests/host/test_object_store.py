"""In an object store, too, a checkpoint is visible only when it is complete, whatever fails meanwhile."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import object_store_driver as driver
import pytest
from fsspec.registry import known_implementations
from object_store_driver import Crash, Faults

from mindspeed_core.errors import ArgumentError, CheckpointError
from mindspeed_train.arguments.stores import check_stores
from mindspeed_train.checkpoint import manifests, publish, staged_files
from mindspeed_train.checkpoint.object_store import ObjectStore
from mindspeed_train.checkpoint.processes import host_name
from mindspeed_train.checkpoint.store_url import check_url

URL = "objects://bucket/run"
HOWS = ("error", "error after", "outage", "truncate", "crash", "crash after")
REASONS = ("permission", "foreign error", "truncate and error")


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
    manifest = manifests.Manifest(
        iteration=iteration, files={path.name: manifests.digest_file(path) for path in files}, job=job
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
        seen.add(f"{prefix}/{name}/{manifests.MANIFEST}")
        seen.update(f"{prefix}/{name}/{file}" for file in store.manifest(name).files)
    return sorted(seen)


def describe(iteration, path):
    return manifests.Manifest(iteration=iteration, files={path.name: manifests.digest_file(path)})


def as_other_process(monkeypatch, name):
    monkeypatch.setattr(publish, "process_id", lambda: name)


def upload_alone(folder, iteration):
    """Begin a save and never end it."""
    store = ObjectStore(URL)
    name = store.begin(iteration)
    (folder / "__0_0.distcp").write_text("half")
    store.upload(name, [folder / "__0_0.distcp"])
    return name


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
    """Number of operations of a save that nothing disturbs."""
    before, step, keep = SCENARIOS[scenario]
    driver.make_folder(folder / "undisturbed")
    if before:
        save(folder, before, "old")
    Faults.set()
    save(folder, step, "new", keep)
    return Faults.count


@pytest.mark.parametrize(
    ("scenario", "how"),
    [*((scenario, how) for scenario in SCENARIOS for how in HOWS), *(("next", how) for how in REASONS)],
)
def test_no_failing_operation_shows_anything_but_complete_checkpoints(objects, monkeypatch, scenario, how):
    before, step, keep = SCENARIOS[scenario]
    number = itertools.count()
    outcomes, said = set(), []
    for at in range(1, operations_of(objects, scenario) + 4):
        driver.make_folder(objects / f"objects-{at}")
        monkeypatch.setattr(publish, "process_id", lambda: f"{host_name()}-{10**8 + next(number)}-1")
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


def test_a_save_under_way_is_no_checkpoint(objects):
    upload_alone(objects, 2)
    assert ObjectStore(URL).find() is None
    save(objects, 1)
    assert ObjectStore(URL).find().manifest.iteration == 1
    with pytest.raises(CheckpointError, match=r"--ckpt-step 2: .* not exist; complete ones in --load: 1"):
        ObjectStore(URL).find(2)


def test_two_runs_in_one_prefix_never_mix_their_files(objects, monkeypatch):
    as_other_process(monkeypatch, "elsewhere-7-7")
    first = upload_alone(objects, 2)
    as_other_process(monkeypatch, "elsewhere-8-8")
    save(objects, 2, "second")
    assert contents(objects, "iter_0000002") == "second 2 __0_0.distcp"
    # The other one may live, and its objects are its own.
    assert ObjectStore(URL).clean_stale() == []
    store = ObjectStore(URL)
    manifest = manifests.Manifest(
        iteration=2, files={"__0_0.distcp": manifests.digest_file(objects / "__0_0.distcp")}
    )
    (objects / "__0_0.distcp").write_text("first")
    store.upload(first, [objects / "__0_0.distcp"])
    manifest = manifests.Manifest(
        iteration=2, files={"__0_0.distcp": manifests.digest_file(objects / "__0_0.distcp")}
    )
    store.publish_save(first, manifest)
    assert contents(objects, "iter_0000002") == "first"


def test_what_dead_runs_left_is_removed_and_what_living_ones_write_is_not(objects, monkeypatch):
    save(objects, 1)
    living = upload_alone(objects, 2)
    as_other_process(monkeypatch, f"{host_name()}-{10**8}-1")
    dead = upload_alone(objects, 3)
    as_other_process(monkeypatch, "elsewhere-1-1")
    upload_alone(objects, 4)
    assert ObjectStore(URL).clean_stale() == [dead]
    monkeypatch.setattr(publish, "_FOREIGN_AGE_SECONDS", -1)
    assert len(ObjectStore(URL).clean_stale()) == 1
    assert [name for name in driver.names() if living in name]
    assert ObjectStore(URL).find().manifest.iteration == 1


def test_old_checkpoints_make_room_by_the_time_they_were_written(objects):
    for iteration in (100, 300, 200):
        save(objects, iteration)
    save(objects, 120, keep=2)
    assert ObjectStore(URL).published() == ["iter_0000120", "iter_0000200"]
    assert driver.names() == referred()


def test_what_was_copied_into_a_store_is_read_and_never_deleted(objects):
    save(objects, 1)
    # As a tool copies a folder that mindspeed-train wrote: the files beside their manifest.
    manifest = manifests.Manifest(
        iteration=2, files={"__0_0.distcp": manifests.digest_file(objects / "__0_0.distcp")}
    )
    store = ObjectStore(URL)
    fs, root = store._open()
    fs.put_file(str(objects / "__0_0.distcp"), f"{root}/iter_0000002/__0_0.distcp")
    fs.pipe_file(f"{root}/iter_0000002/manifest.json", manifests.describe(manifest).encode())
    assert store.find(2).manifest.iteration == 2
    assert contents(objects, "iter_0000002").startswith("weights 1")
    save(objects, 3, keep=1)
    assert store.published() == ["iter_0000002", "iter_0000003"]


def test_a_job_finds_what_it_published_last(objects, caplog):
    save(objects, 1, job="a")
    save(objects, 2, job="b")
    save(objects, 3, job="a")
    store = ObjectStore(URL)
    assert store.find_of_job("b").url == f"{URL}/iter_0000002"
    assert store.find_of_job("a").manifest.iteration == 3
    assert store.find_of_job("c") is None
    manifest = driver.Objects._file("bucket/run/iter_0000003/manifest.json")
    manifest.write_text(manifest.read_text()[:50])
    assert store.find_of_job("a").manifest.iteration == 1
    assert "iter_0000003/manifest.json: damaged" in caplog.text


def test_a_refused_list_is_an_error_and_no_empty_store(objects):
    save(objects, 1)
    Faults.set(1, "permission", ("ls",))
    with pytest.raises(CheckpointError, match="objects://bucket/run: no permission") as caught:
        ObjectStore(URL).find()
    assert "geheim" not in str(caught.value)


def test_objects_that_only_their_writer_sees_are_not_published(objects):
    store = ObjectStore(URL)
    save_name = store.begin(1)
    with pytest.raises(CheckpointError, match="was written, but is not in the store"):
        store.publish_save(save_name, manifests.Manifest(iteration=1, files={"x": (1, "0" * 64)}))
    assert driver.names() == []


def test_a_server_of_files_gets_the_folders_it_needs_and_no_new_share(objects):
    save(objects, 1, url="fileserver://share/a/run")
    assert contents(objects, "iter_0000001", "fileserver://share/a/run").startswith("weights 1")
    with pytest.raises(CheckpointError, match="does not exist"):
        save(objects, 1, url="fileserver://misspelt/run")
    ObjectStore("fileserver://share/a/run").check_writable()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://key:geheim@bucket/run", ["s3://***@bucket/run", "a password in a URL"]),
        ("s3://bucket/run?token=geheim", ["is no plain prefix"]),
        ("objects://bucket/run*", ["is no plain prefix"]),
        ("objects://bucket/../run", ["is no plain prefix"]),
        ("simplecache::objects://bucket/run", ["chained URLs"]),
        ("objects://", ["names no bucket", "objects://bucket/folder"]),
        ("file://run", ["names no absolute path"]),
        (
            "nosuch://bucket/run",
            ["fsspec knows no protocol 'nosuch'", "'mindspeed-core[fsspec]'"],
        ),
        (
            "missing://bucket/run",
            ["driver of 'missing' is missing (Install missingfs", "core[fsspec]"],
        ),
    ],
)
def test_a_url_that_cannot_hold_checkpoints_is_refused(monkeypatch, url, words):
    entry = {"class": "missingfs.FileSystem", "err": "Install missingfs to access it"}
    monkeypatch.setitem(known_implementations, "missing", entry)
    with pytest.raises(ArgumentError) as caught:
        check_url("--save", url)
    for word in ("--save", *words):
        assert word in str(caught.value)
    assert "geheim" not in str(caught.value)


def test_without_fsspec_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.registry", None)
    with pytest.raises(ArgumentError, match=r"--load 's3://b/run': needs the package fsspec; pip install"):
        check_url("--load", "s3://b/run")


def places(**given):
    names = ("save", "load", "pretrained_checkpoint", "checkpoint_staging")
    return Namespace(**{name: given.get(name) for name in names}, world_size=given.get("world_size", 1))


def test_a_url_of_this_machine_is_a_folder():
    args = places(save="file:///data/run", load="local:///data/old", pretrained_checkpoint="plain/folder")
    check_stores(args)
    assert (args.save, args.load, args.pretrained_checkpoint) == ("/data/run", "/data/old", "plain/folder")


def test_the_memory_of_one_process_is_refused_where_there_are_several():
    check_stores(places(save="memory://bucket/run"))
    with pytest.raises(ArgumentError, match="--save 'memory://bucket/run': is the memory of one process"):
        check_stores(places(save="memory://bucket/run", world_size=2))


def test_files_are_staged_on_a_disk_of_ones_own(tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match="--checkpoint-staging 's3://b/x': files are staged on a disk"):
        check_stores(places(checkpoint_staging="s3://b/x"))
    monkeypatch.setattr(staged_files.tempfile, "gettempdir", lambda: str(tmp_path))
    root = staged_files.staging_root()
    assert root.stat().st_mode & 0o777 == 0o700
    root.rmdir()
    root.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"--checkpoint-staging .*: belongs to somebody else"):
        staged_files.staging_root()
    assert staged_files.staging_root(places(checkpoint_staging=str(tmp_path / "a" / "b"))).is_dir()


def test_a_manifest_cannot_place_files_outside_the_staging_folder(objects):
    save(objects, 1)
    manifest = ObjectStore(URL).manifest("iter_0000001")
    digest = next(iter(manifest.files.values()))
    twice = replace(manifest, files={"a/x": digest, "b/x": digest})
    with pytest.raises(CheckpointError, match="no name of their own"):
        staged_files.stored_files(ObjectStore(URL), "iter_0000001", twice)


KILLED = """
import sys
from pathlib import Path
import object_store_driver
from mindspeed_train.checkpoint.object_store import ObjectStore

store = ObjectStore("objects://bucket/run")
store.upload(store.begin(2), [Path(sys.argv[1])])
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_uploaded_goes_at_the_next_start(objects):
    save(objects, 1)
    command = [sys.executable, "-c", KILLED, str(objects / "__0_0.distcp")]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=path) as child:
        assert child.stdout.readline() == b"ready\n"
        assert ObjectStore(URL).clean_stale() == []
        child.kill()
    assert ObjectStore(URL).find().manifest.iteration == 1
    assert len(ObjectStore(URL).clean_stale()) == 1
    assert driver.names() == referred()

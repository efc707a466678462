"""Runs that save into an object store and resume from it are those that use a folder, bit for bit."""

from __future__ import annotations

import json
import os
import resource
import shutil
from importlib.metadata import version
from pathlib import Path

import object_store_driver as driver
import pytest
from object_store_driver import Faults
from packaging.version import Version
from test_checkpoint_resume import (
    NO_DROPOUT,
    SHARDED,
    Messages,
    close_run,
    error_of,
    numbers,
    open_run,
    save,
    train,
    uninterrupted_and_resumed,
)
from test_megatron_fsdp import FULL, LLAMA

from mindspeed_testing.worlds import run_world

BUCKET = "objects://bucket"
FULLY_SHARDED = {"torch FSDP2": ("--use-torch-fsdp2",)}
if Version("0.16") <= Version(version("megatron-core")) < Version("0.18"):
    # Megatron-FSDP's parts are described as 0.16 cuts them, its corrections are those up to 0.17.
    FULLY_SHARDED["Megatron-FSDP"] = FULL


def staging(root):
    return ["--checkpoint-staging", str(root / "staging")]


def store_in(root):
    driver.make_folder(root / "objects")
    return staging(root)


def left_in(root):
    return sorted(path.name for path in (root / "staging").iterdir())


def saving_error(run):
    from mindspeed_train.checkpoint.save import Saver

    try:
        save(run)
        run.session.state(Saver).poll(blocking=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_uploads(flags, rank):
    """Saves that fail in different ways on the last rank, after one that succeeded."""
    url = f"{BUCKET}/refused"
    run = open_run(["--save", url, *flags])
    train(run, 1)
    save(run)
    from mindspeed_train.checkpoint.object_store import ObjectStore
    from mindspeed_train.checkpoint.save import Saver

    run.session.state(Saver).poll(blocking=True)
    found = {}
    for how in ("permission", "truncate"):
        train(run, 1)
        if rank == int(os.environ["WORLD_SIZE"]) - 1:
            Faults.set(1, how, ("put_file",))
        found[how] = saving_error(run)
        Faults.set()
        latest = ObjectStore(url).find()
        found[f"{how}, after"] = (latest.manifest.iteration, latest.warning, ObjectStore(url).published())
    # What was removed on rank 0 is seen by all once they have met.
    found["keys"] = sorted({key.split("/")[2] for key in driver.names() if key.startswith("bucket/refused/")})
    train(run, 1)
    found["next"] = saving_error(run)
    close_run(run)
    return found


def change(name, edit):
    """Edit the one object whose key ends so."""
    (key,) = (key for key in driver.names() if key.startswith("bucket/plain/") and key.endswith(name))
    path = driver.Objects._file(key)
    before = path.read_bytes()
    path.write_bytes(edit(before))
    return lambda: path.write_bytes(before)


def flipped(content):
    return (
        content[: len(content) // 2]
        + bytes([content[len(content) // 2] ^ 1])
        + content[len(content) // 2 + 1 :]
    )


def damaged(flags):
    load = ["--load", f"{BUCKET}/plain", *flags]
    errors = {}
    for name, file, edit in (
        ("bit flip", "__0_0.distcp", flipped),
        ("truncated", "__0_1.distcp", lambda content: content[:100]),
        ("manifest", "manifest.json", lambda content: content[:-20]),
    ):
        restore = change(file, edit)
        errors[name] = error_of(lambda: open_run(load))
        errors[f"{name}, sizes"] = error_of(lambda: open_run([*load, "--verify-checkpoint", "size"]))
        restore()
    return errors


def small_disk(flags):
    from mindspeed_train.checkpoint import staged_files

    class Full:
        disk_usage = staticmethod(lambda path: shutil._ntuple_diskusage(10, 9, 1))
        rmtree = staticmethod(shutil.rmtree)

    original, staged_files.shutil = staged_files.shutil, Full
    try:
        return error_of(lambda: open_run(["--load", f"{BUCKET}/plain", *flags]))
    finally:
        staged_files.shutil = original


def full_staging(flags):
    """A save for which the disk that it is staged on has no room."""
    run = open_run(["--save", f"{BUCKET}/full", *flags])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        said = saving_error(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    close_run(run)
    return said


def ways_of_loading(root, flags):
    """From which step runs start, with which weights, and what they say."""
    url = f"{BUCKET}/ways"
    run = open_run(["--save", url, *flags, "--keep-last-n", "2"])
    paths = []
    for _ in range(3):
        train(run, 1)
        paths.append(save(run).path)
    close_run(run)
    tree = root / "tree"
    for key in driver.names():
        if key.startswith("bucket/ways/"):
            target = tree / key.removeprefix("bucket/ways/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(driver.Objects._file(key), target)
    found = {"paths": paths}
    for name, more in {
        "step": ["--load", url, "--ckpt-step", "2"],
        "finetune": ["--load", url, "--finetune"],
        "pretrained": ["--load", f"{BUCKET}/empty", "--pretrained-checkpoint", url],
        "nothing": ["--load", f"{BUCKET}/empty"],
        "copied": ["--load", f"file://{tree}"],
    }.items():
        messages = Messages()
        run = open_run([*more, *flags])
        found[name] = (run.iteration, str(run.loaded.path), messages.end())
        close_run(run)
    found["missing"] = error_of(lambda: open_run(["--load", url, "--ckpt-step", "9", *flags]))
    found["restarted"] = restarted(url, flags)
    driver.Objects._file("bucket/ways/iter_0000005/manifest.json").unlink()
    messages = Messages()
    run = open_run(["--load", url, *flags])
    found["unpublished"] = (run.iteration, messages.end())
    close_run(run)
    return found


def restarted(url, flags):
    """Step and checkpoint from which a job starts again that saved in its first attempt."""
    os.environ.update(MINDSPEED_JOB_ID="j1", MINDSPEED_RESTART="0")
    # An earlier job saved there.
    command = ["--save", url, "--start-over", *flags]
    run = open_run(command)
    run.iteration = 5
    save(run)
    close_run(run)
    os.environ.update(MINDSPEED_RESTART="1")
    run = open_run(command)
    found = run.iteration, str(run.loaded.path)
    close_run(run)
    del os.environ["MINDSPEED_JOB_ID"], os.environ["MINDSPEED_RESTART"]
    return found


def megatron_lms(root, flags):
    """A checkpoint without manifest, its files right under the step."""
    directory = root / "flat"
    run = open_run(["--save", str(directory), *flags])
    train(run, 2)
    save(run)
    close_run(run)
    for path in directory.rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            key = f"bucket/flat/{path.relative_to(directory)}"
            shutil.copyfile(path, driver.Objects._file(key))
    load = ["--load", f"{BUCKET}/flat", *flags]
    refused = error_of(lambda: open_run(load))
    run = open_run([*load, "--verify-checkpoint", "off"])
    found = run.iteration
    close_run(run)
    return refused, found


def inspected(root):
    from mindspeed_train.checkpoint.inspection import inspect
    from mindspeed_train.program import main

    restore = change("__0_0.distcp", flipped)
    broken = inspect(f"{BUCKET}/plain")["problems"]
    by_size = inspect(f"{BUCKET}/plain", verify="size")["problems"]
    restore()
    whole = inspect(f"{BUCKET}/plain/iter_0000002", values=True)
    status = main(["inspect", f"{BUCKET}/plain", "--json"])
    status += main(["inspect", f"file://{root}/tree"])
    return broken, by_size, json.loads(json.dumps(whole, default=str)), status


def single_world(directory):
    root = Path(directory)
    flags = store_in(root)
    results = {
        "plain": uninterrupted_and_resumed(f"{BUCKET}/plain", flags),
        "async": uninterrupted_and_resumed(f"{BUCKET}/async", ["--async-save", *flags]),
        "memory": uninterrupted_and_resumed("memory://bucket/run", flags),
        "file server": uninterrupted_and_resumed("fileserver://share/run", flags),
        "damaged": damaged(flags),
        "small disk": small_disk(flags),
        "full staging": full_staging(flags),
        "ways": ways_of_loading(root, flags),
        "megatron-lm": megatron_lms(root, flags),
        "refused": refused_uploads(flags, 0),
        "inspected": inspected(root),
        "folder": (str(Path("objects:").exists()), left_in(root)),
    }
    driver.make_folder(root / "forbidden")
    Faults.set(1, "permission", ("pipe_file",))
    results["forbidden"] = error_of(lambda: open_run(["--save", f"{BUCKET}/x", *flags]))
    return results


PAIRS = {
    "sharded dp2": SHARDED[:2],
    "async dp2": [*SHARDED[:1], "--async-save"],
    **{name: [*sharded, *LLAMA] for name, sharded in FULLY_SHARDED.items()},
}


def pair_world(directory, cases):
    root, rank = Path(directory), int(os.environ["RANK"])
    flags = store_in(root)
    results = {
        name: uninterrupted_and_resumed(f"{BUCKET}/{number}", [*own, *flags])
        for number, (name, own) in enumerate(PAIRS.items())
        if name in cases
    }
    results["refused"] = refused_uploads([*flags, "--async-save"], rank)
    source = f"{BUCKET}/reshard"
    run = open_run(["--save", source, *NO_DROPOUT, SHARDED[0], *flags])
    train(run, 2)
    save(run)
    results["source"] = train(run, 3)
    close_run(run)
    run = open_run(["--load", source, *NO_DROPOUT, SHARDED[0], *flags, "--tensor-model-parallel-size", "2"])
    results["tp2"] = train(run, 3)
    close_run(run)
    results["left"] = left_in(root)
    return results


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return run_world(single_world, 1, str(tmp_path_factory.mktemp("single")), timeout=200)[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory, asked_for):
    return run_world(pair_world, 2, str(tmp_path_factory.mktemp("pair")), asked_for("case"), timeout=200)


@pytest.mark.parametrize("case", ["plain", "async", "memory", "file server"])
def test_a_run_resumes_from_a_store_bit_for_bit(single, case):
    expected, resumed, start, said = single[case]
    assert (start, said) == ((2, 8), [])
    assert resumed == expected


@pytest.mark.parametrize("case", PAIRS)
def test_two_ranks_resume_from_a_store_bit_for_bit(pair, case):
    expected, resumed, start, _ = pair[0][case]
    assert start == (2, 8)
    assert resumed == expected


def test_another_layout_takes_over_from_a_store(pair):
    assert numbers(pair[0]["tp2"]) == pytest.approx(numbers(pair[0]["source"]), rel=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_upload_that_one_rank_is_refused_fails_on_all(pair, rank):
    said = pair[rank]["refused"]["permission"]
    assert said.startswith("CheckpointError: ")
    assert "objects://bucket/refused/iter_0000002/" in said
    assert "no permission" in said
    assert "geheim" not in said


def test_an_upload_that_was_cut_short_is_found_before_it_is_published(single, pair):
    for found in (single["refused"], pair[0]["refused"], pair[1]["refused"]):
        assert "bytes in the store" in found["truncate"]


def test_failed_saves_leave_the_last_one_the_latest(single, pair):
    for found in (single["refused"], pair[0]["refused"]):
        assert found["permission, after"] == found["truncate, after"] == (1, "", ["iter_0000001"])
        assert found["keys"] == ["iter_0000001", "latest_checkpointed_iteration.txt"]
        assert found["next"] == ""


def test_nothing_stays_staged(single, pair):
    assert single["folder"] == ("False", [])
    assert pair[0]["left"] == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("bit flip", ["objects://bucket/plain/iter_0000002/__0_0.distcp", "SHA-256", "--ckpt-step"]),
        ("truncated", ["objects://bucket/plain/iter_0000002/__0_1.distcp", "truncated"]),
        ("truncated, sizes", ["objects://bucket/plain/iter_0000002/__0_1.distcp", "truncated"]),
        ("manifest", ["objects://bucket/plain/iter_0000002/manifest.json", "damaged"]),
    ],
)
def test_damage_is_named_by_its_url(single, damage, words):
    for word in words:
        assert word in single["damaged"][damage]


def test_a_disk_too_small_to_stage_names_the_flag(single):
    assert "--checkpoint-staging" in single["small disk"]
    assert "GiB" in single["small disk"]


def test_a_save_that_finds_no_room_to_stage_names_the_flag(single):
    for words in (
        "CheckpointError",
        "objects://bucket/full/iter_0000000",
        "--checkpoint-staging",
        "refused a write",
    ):
        assert words in single["full staging"]


def test_checkpoints_are_chosen_as_in_a_folder(single):
    ways, url = single["ways"], f"{BUCKET}/ways"
    assert ways["paths"] == [f"{url}/iter_000000{step}" for step in (1, 2, 3)]
    assert ways["step"][:2] == (2, f"{url}/iter_0000002")
    assert ways["finetune"][:2] == (0, f"{url}/iter_0000003")
    assert ways["pretrained"][:2] == (0, f"{url}/iter_0000003")
    assert ways["nothing"][:2] == (0, "None")
    assert "starting from scratch" in ways["nothing"][2][0]
    assert "complete ones in --load: 2, 3" in ways["missing"]


def test_a_copy_of_a_store_on_a_disk_is_a_checkpoint(single):
    step, path, _ = single["ways"]["copied"]
    assert step == 3
    assert "/tree/iter_0000003" in path


def test_a_restarted_job_continues_from_what_it_put_into_the_store(single):
    assert single["ways"]["restarted"] == (5, f"{BUCKET}/ways/iter_0000005")


def test_objects_without_a_manifest_are_no_checkpoint(single):
    step, said = single["ways"]["unpublished"]
    assert step == 3
    assert f"{BUCKET}/ways/latest_checkpointed_iteration.txt names step 5, which has no directory" in said[0]


def test_a_checkpoint_of_another_program_is_read_when_it_is_asked_for(single):
    refused, step = single["megatron-lm"]
    assert "--verify-checkpoint off" in refused
    assert step == 2


def test_a_store_that_takes_nothing_is_found_before_training(single):
    assert "objects://bucket/x" in single["forbidden"]
    assert "no permission" in single["forbidden"]
    assert "geheim" not in single["forbidden"]


def test_inspect_reads_a_store(single):
    broken, by_size, whole, status = single["inspected"]
    assert len(broken) == 1
    assert "objects://bucket/plain/iter_0000002/__0_0.distcp" in broken[0]
    assert by_size == whole["problems"] == []
    assert (whole["path"], whole["iteration"], status) == ("objects://bucket/plain/iter_0000002", 2, 0)

"""A checkpoint is visible only when it is complete, whatever happens to the process that writes it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from mindspeed_core.errors import CheckpointError
from mindspeed_train.checkpoint import manifests, publish
from mindspeed_train.checkpoint.os_errors import explain

INTERRUPTED = """
import sys
from pathlib import Path
from mindspeed_train.checkpoint import manifests
from mindspeed_train.checkpoint import publish

temporary = publish.begin(Path(sys.argv[1]), 2)
(temporary / "shard").write_text("half")
if sys.argv[2] == "described":
    files = {"shard": manifests.digest_file(temporary / "shard")}
    publish.write_synced(temporary / manifests.MANIFEST, "{}")
if sys.argv[2] == "renamed":
    manifest = manifests.Manifest(iteration=2, files={"shard": manifests.digest_file(temporary / "shard")})
    publish.write_tracker = lambda *arguments: print("ready", flush=True) or sys.stdin.read()
    publish.publish(temporary, manifest)
print("ready", flush=True)
sys.stdin.read()
"""


def write(save_dir, iteration, text="weights"):
    temporary = publish.begin(save_dir, iteration)
    (temporary / "shard").write_text(f"{text} {iteration}")
    files = {"shard": manifests.digest_file(temporary / "shard")}
    return publish.publish(temporary, manifests.Manifest(iteration=iteration, files=files))


def numbers(save_dir):
    return sorted(path.name for path in save_dir.iterdir() if path.is_dir())


def killed_while_saving(save_dir, moment):
    command = [sys.executable, "-c", INTERRUPTED, str(save_dir), moment]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        child.kill()


@pytest.mark.parametrize("moment", ["writing", "described"])
def test_a_save_killed_before_the_rename_never_becomes_latest(tmp_path, moment):
    write(tmp_path, 1)
    killed_while_saving(tmp_path, moment)
    found = publish.find(tmp_path)
    assert (found.manifest.iteration, found.warning) == (1, "")


def test_a_save_killed_between_rename_and_tracker_leaves_the_tracker_right(tmp_path):
    write(tmp_path, 1)
    killed_while_saving(tmp_path, "renamed")
    assert publish.find(tmp_path).manifest.iteration == 1
    assert publish.find(tmp_path, 2).manifest.iteration == 2


def test_the_next_start_clears_what_a_killed_run_left(tmp_path):
    write(tmp_path, 1)
    killed_while_saving(tmp_path, "writing")
    assert len(publish.clean_stale(tmp_path)) == 1
    assert numbers(tmp_path) == ["iter_0000001"]


def test_the_directory_of_a_living_run_is_not_cleared(tmp_path):
    temporary = publish.begin(tmp_path, 3)
    assert publish.clean_stale(tmp_path) == []
    assert temporary.is_dir()


def test_a_missing_tracker_means_the_newest_complete_checkpoint_and_a_warning(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / publish.TRACKER).unlink()
    found = publish.find(tmp_path)
    assert found.manifest.iteration == 2
    assert "missing" in found.warning


@pytest.mark.parametrize("text", ["", "7", "release", "2x"])
def test_a_useless_tracker_means_the_newest_complete_checkpoint_and_a_warning(tmp_path, text):
    write(tmp_path, 1)
    (tmp_path / "iter_0000009").mkdir()
    (tmp_path / publish.TRACKER).write_text(text)
    found = publish.find(tmp_path)
    assert found.manifest.iteration == 1
    assert publish.TRACKER in found.warning


def test_a_tracker_that_names_an_incomplete_directory_is_not_believed(tmp_path):
    write(tmp_path, 1)
    (tmp_path / "iter_0000009").mkdir()
    (tmp_path / publish.TRACKER).write_text("9")
    found = publish.find(tmp_path)
    assert found.manifest.iteration == 1
    assert "never completed" in found.warning


def test_only_incomplete_directories_are_an_error_not_a_fresh_start(tmp_path):
    (tmp_path / "iter_0000009").mkdir()
    with pytest.raises(CheckpointError, match="no other complete checkpoint"):
        publish.find(tmp_path)


def test_an_empty_directory_holds_nothing(tmp_path):
    assert publish.find(tmp_path) is None
    assert publish.find(tmp_path / "nowhere") is None


def test_the_most_recently_written_checkpoints_stay_also_after_going_back(tmp_path):
    for iteration in (100, 200, 300):
        path = write(tmp_path, iteration)
        os.utime(path / manifests.MANIFEST, ns=(iteration, iteration))
    latest = write(tmp_path, 120)
    publish.keep_last(tmp_path, 2, latest)
    assert numbers(tmp_path) == ["iter_0000120", "iter_0000300"]


def test_links_and_foreign_directories_are_never_deleted(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    outside = write(elsewhere, 1)
    save_dir = tmp_path / "save"
    latest = write(save_dir, 5)
    (save_dir / "iter_0000001").symlink_to(outside)
    (save_dir / "iter_0000002").mkdir()
    publish.keep_last(save_dir, 1, latest)
    assert numbers(save_dir) == ["iter_0000001", "iter_0000002", "iter_0000005"]
    assert (outside / "shard").exists()


def test_saving_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 1, "old")
    write(tmp_path, 1, "new")
    assert (tmp_path / "iter_0000001" / "shard").read_text() == "new 1"
    assert numbers(tmp_path) == ["iter_0000001"]


def test_a_manifest_cannot_name_files_outside(tmp_path):
    path = write(tmp_path, 1) / manifests.MANIFEST
    data = json.loads(path.read_text())
    data["files"]["../secret"] = data["files"].pop("shard")
    data.pop("digest")
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="secret"):
        publish.find(tmp_path)


def test_a_manifest_whose_own_text_changed_is_refused(tmp_path):
    path = write(tmp_path, 1) / manifests.MANIFEST
    digest = json.loads(path.read_text())["files"]["shard"][1]
    path.write_text(path.read_text().replace(digest, digest[::-1]))
    with pytest.raises(CheckpointError, match=r"manifest\.json: its own text changed"):
        manifests.read_manifest(path.parent)


def test_a_manifest_without_a_digest_is_read(tmp_path):
    path = write(tmp_path, 1) / manifests.MANIFEST
    data = json.loads(path.read_text())
    data.pop("digest")
    path.write_text(json.dumps(data))
    assert manifests.read_manifest(path.parent).iteration == 1


def test_a_full_disk_is_said_with_a_way_out():
    text = explain(OSError(errno.ENOSPC, "No space left on device", "/data/x"))
    assert "no space left" in text
    assert "/data/x" in text
    assert "--keep-last-n" in text


def older(save_dir, name, rank="mp_rank_00"):
    (save_dir / name / rank).mkdir(parents=True)
    (save_dir / name / rank / "model_optim_rng.pt").write_bytes(b"a pickle")


@pytest.mark.parametrize("unpublished", [False, True])
@pytest.mark.parametrize("step", [None, 2])
@pytest.mark.parametrize("rank", ["mp_rank_00", "mp_rank_00_001_000"])
def test_a_checkpoint_with_a_pickle_for_each_rank_is_refused(tmp_path, unpublished, step, rank):
    older(tmp_path, "iter_0000002", rank)
    (tmp_path / publish.TRACKER).write_text("2")
    with pytest.raises(CheckpointError, match=r"older format `torch`.*--ckpt-convert-format torch_dist"):
        publish.find(tmp_path, step, accept_unpublished=unpublished)


def test_an_older_step_is_not_loaded_in_place_of_one_that_cannot_be_read(tmp_path):
    write(tmp_path, 1)
    older(tmp_path, "iter_0000002")
    (tmp_path / publish.TRACKER).write_text("2")
    with pytest.raises(CheckpointError, match="iter_0000002 is in Megatron-LM's older format"):
        publish.find(tmp_path)


@pytest.mark.parametrize(
    ("pickles", "says"), [(True, "release is in .* older format"), (False, "rename that")]
)
def test_weights_without_a_step_do_not_start_from_scratch(tmp_path, pickles, says):
    if pickles:
        older(tmp_path, "release")
    else:
        (tmp_path / "release").mkdir()
    (tmp_path / publish.TRACKER).write_text("release")
    with pytest.raises(CheckpointError, match=says):
        publish.find(tmp_path)


def test_the_noted_format_does_not_hide_that_such_a_checkpoint_was_to_be_loaded(tmp_path):
    from mindspeed_core.activation import prepare
    from mindspeed_train import loop

    older(tmp_path, "iter_0000002")
    (tmp_path / publish.TRACKER).write_text("2")
    flags = (
        "--platform cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
        "--micro-batch-size 1 --vocab-size 32 --mock-data --tokenizer-type NullTokenizer --train-iters 1 "
        f"--lr 1e-3 --ckpt-format torch --load {tmp_path}"
    )
    with prepare(flags.split(), host="standalone") as session:
        assert [note.flag for note in session.plan.flag_notes] == ["--ckpt-format torch"]
        with pytest.raises(CheckpointError, match=r"--load .* older format `torch`"):
            loop.setup(session)
        loop.teardown(session)


def test_a_tracker_without_any_checkpoint_does_not_start_from_scratch(tmp_path):
    (tmp_path / publish.TRACKER).write_text("latest")
    with pytest.raises(CheckpointError, match="no checkpoint is there"):
        publish.find(tmp_path)

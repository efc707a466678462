"""A folder that goes away or stops taking files while a run saves into it: one message, and no harm."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from mindspeed_core.errors import CheckpointError
from mindspeed_testing.worlds import run_world
from mindspeed_train.checkpoint import manifests, publish

FLAGS = (
    "--platform cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 1 --mock-data --num-workers 0 --lr 1e-3 "
    "--train-iters 99 --eval-iters 0 --use-distributed-optimizer --no-progress"
).split()
MODES = {"foreground": (), "background": ("--async-save",)}


def remove(folder, session):
    shutil.rmtree(folder)


def become_file(folder, session):
    shutil.rmtree(folder)
    folder.write_text("")


def dangle(folder, session):
    shutil.rmtree(folder)
    folder.symlink_to(folder.parent / "nowhere")


def refuse_in(session, function, refuse):
    """Replace a function of the module that writes until the session closes."""
    patch = mock.patch.object(publish, function, refuse)
    patch.start()
    session.at_close(patch.stop)


def become_read_only(folder, session):
    """Let the file system refuse every new file, as one that was mounted anew does."""

    def refuse(path, *rest, **named):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    refuse_in(session, "write_synced", refuse)


def fill_up(folder, session):
    """Let the last file of a save find no room."""

    def refuse(path, *rest, **named):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    refuse_in(session, "sync_files", refuse)


EVENTS = {
    "removed": remove,
    "a file": become_file,
    "a dangling link": dangle,
    "read-only": become_read_only,
    "full": fill_up,
}


def lose_folders(root):
    """Lose the folder of one run after another; what the next save says, and what is left."""
    import multiprocessing

    from mindspeed_core.activation import activate
    from mindspeed_train import loop
    from mindspeed_train.checkpoint.save import Saver

    multiprocessing.current_process()._config["daemon"] = False
    found = {}
    for mode, flags in MODES.items():
        for event, happen in EVENTS.items():
            folder = Path(root) / f"{mode} {event}"
            with activate([*FLAGS, *flags, "--save", str(folder)], host="standalone") as session:
                run = loop.setup(session)
                said = []
                for step in range(3):
                    session.call("train_step", run=run)
                    run.iteration += 1
                    try:
                        session.call("save_checkpoint", run=run, reason="interval")
                        session.state(Saver).poll(blocking=True)
                    except CheckpointError as error:
                        said.append(str(error))
                    if step == 0:
                        happen(folder, session)
                loop.teardown(session)
            found[f"{mode}, {event}"] = said, state(folder)
    return found


def state(folder):
    """The names in a folder and the step that would be loaded from it."""
    if not folder.is_dir():
        return [], None
    checkpoint = publish.find(folder)
    return sorted(path.name for path in folder.iterdir()), checkpoint and checkpoint.manifest.iteration


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    (found,) = run_world(lose_folders, 1, str(tmp_path_factory.mktemp("lost")), timeout=200.0)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_removed_folder_is_made_again(lost, mode):
    said, (names, latest) = lost[f"{mode}, removed"]
    assert said == []
    assert latest == 3
    assert names == ["iter_0000002", "iter_0000003", publish.TRACKER]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("event", ["a file", "a dangling link"])
def test_what_takes_the_place_of_a_folder_is_named(lost, mode, event):
    said, _ = lost[f"{mode}, {event}"]
    assert len(said) == 2
    for text in said:
        assert text.startswith("--save ")
        assert "no folder is in its place" in text
        assert "choose another folder" in text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("event", "words"), [("read-only", "read-only"), ("full", "no space left")])
def test_a_save_that_is_refused_leaves_the_one_before_it_the_latest(lost, mode, event, words):
    said, (names, latest) = lost[f"{mode}, {event}"]
    assert len(said) == 2
    assert all(words in text and "iter_000000" in text for text in said)
    assert latest == 1
    assert names == ["iter_0000001", publish.TRACKER]


def write(folder, step):
    temporary = publish.begin(folder, step)
    (temporary / "shard").write_text(f"weights {step}")
    files = {"shard": manifests.digest_file(temporary / "shard")}
    return publish.publish(temporary, manifests.Manifest(iteration=step, files=files))


def test_a_linked_folder_is_saved_into(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", 1)
    assert publish.find(tmp_path / "real").manifest.iteration == 1


def test_a_linked_checkpoint_is_replaced_and_its_target_kept(tmp_path):
    kept = write(tmp_path / "elsewhere", 1)
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "iter_0000001").symlink_to(kept)
    # It leads out of the folder that is named.
    with pytest.raises(CheckpointError, match=r"iter_0000001: is a link to .*; name .*elsewhere instead"):
        publish.find(tmp_path / "save", 1)
    write(tmp_path / "save", 1)
    assert not (tmp_path / "save" / "iter_0000001").is_symlink()
    assert publish.find(tmp_path / "save", 1).manifest.iteration == 1
    assert json.loads((kept / manifests.MANIFEST).read_text())["iteration"] == 1


def test_a_linked_tracker_is_replaced_and_its_target_kept(tmp_path):
    write(tmp_path, 1)
    (tmp_path / "shared").write_text("1")
    (tmp_path / publish.TRACKER).unlink()
    (tmp_path / publish.TRACKER).symlink_to(tmp_path / "shared")
    write(tmp_path, 2)
    assert (tmp_path / "shared").read_text() == "1"
    assert publish.find(tmp_path).manifest.iteration == 2


def test_a_dangling_checkpoint_is_not_loaded(tmp_path):
    write(tmp_path, 1)
    (tmp_path / "iter_0000002").symlink_to(tmp_path / "nowhere")
    (tmp_path / publish.TRACKER).write_text("2")
    found = publish.find(tmp_path)
    assert found.manifest.iteration == 1
    assert "names step 2, which has no directory" in found.warning

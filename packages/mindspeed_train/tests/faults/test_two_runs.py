"""Two runs that save into one folder: the second is refused, whatever machine it is on; restarts are not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import pytest

from mindspeed_core.errors import CheckpointError
from mindspeed_testing.faults import start_job
from mindspeed_train.checkpoint import publish, save_folder
from mindspeed_train.checkpoint.save_folder import FILE, Owner, SaveFolder, this_process

FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --mock-data --num-workers 0 --lr 1e-3 --lr-decay-style constant "
    "--train-iters 20000 --eval-iters 0 --no-progress --nproc 1"
).split()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(save_folder, "ENDING_SECONDS", 0.3)
    monkeypatch.setattr(save_folder, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(save_folder, "TOUCH_SECONDS", 0.05)


def keep(folder):
    """A run that owns the folder, and what ends its ownership."""
    run = SaveFolder()
    run.keep(folder, lambda action: None)
    return run


def leave(folder, owner):
    """The file of another owner."""
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(json.dumps(asdict(owner)))


def elsewhere(**changes):
    return Owner("node7", 1, 4711, 99, since="2026-01-02 03:04:05", **changes)


def dead_process():
    """The owner that a process of this machine was which has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    return replace(this_process(), pid=child.pid, start=1)


def touching(folder):
    """Touch the file as a living owner on another machine does, until the event is set."""
    stop = threading.Event()

    def touch():
        count = 0
        while not stop.wait(0.02):
            count += 1
            os.utime(folder / FILE, ns=(count, count))

    threading.Thread(target=touch, daemon=True).start()
    return stop


def test_a_living_process_of_this_machine_keeps_its_folder(tmp_path):
    leave(tmp_path, replace(this_process(), pid=os.getppid(), start=save_folder.start_of(os.getppid())))
    with pytest.raises(CheckpointError) as caught:
        keep(tmp_path)
    text = str(caught.value)
    for word in (f"--save {tmp_path}", f"process {os.getppid()} on", "choose another folder", FILE):
        assert word in text


def test_an_owner_that_was_killed_on_this_machine_is_followed_at_once(tmp_path):
    leave(tmp_path, dead_process())
    keep(tmp_path).release()
    assert not (tmp_path / FILE).exists()


def test_a_process_with_a_dead_owners_number_is_not_taken_for_it(tmp_path):
    leave(tmp_path, replace(this_process(), start=1))
    assert save_folder.read_owner(keep(tmp_path)._folder).is_same_run(this_process())


def test_a_living_owner_on_another_machine_keeps_its_folder(tmp_path):
    leave(tmp_path, elsewhere(job="slurm:12"))
    stop = touching(tmp_path)
    with pytest.raises(CheckpointError, match=r"process 4711 on node7 of job slurm:12, since 2026-01-02"):
        keep(tmp_path)
    stop.set()


def test_an_owner_on_another_machine_that_is_silent_is_followed(tmp_path):
    leave(tmp_path, elsewhere())
    assert keep(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}'])
def test_a_damaged_file_of_an_owner_delays_and_stops_nobody(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert keep(tmp_path)


def test_a_restart_of_the_same_job_on_another_machine_does_not_wait(tmp_path, monkeypatch):
    leave(tmp_path, elsewhere(job="slurm:12", restart=0))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(save_folder, "SILENT_SECONDS", 1e6)
    assert keep(tmp_path)


def test_a_container_of_the_same_name_is_another_machine(tmp_path):
    leave(tmp_path, replace(this_process(), namespace=1, pid=4711, start=1))
    stop = touching(tmp_path)
    with pytest.raises(CheckpointError, match="another run saves into it"):
        keep(tmp_path)
    stop.set()


def test_the_owner_touches_its_file_and_no_others(tmp_path):
    run = keep(tmp_path)
    os.utime(tmp_path / FILE, ns=(1, 1))
    assert save_folder._comes_true(lambda: (tmp_path / FILE).stat().st_mtime_ns > 1, 10.0)
    leave(tmp_path, elsewhere())
    assert not save_folder._comes_true(lambda: save_folder.read_owner(tmp_path) != elsewhere(), 0.3)
    run.release()
    assert save_folder.read_owner(tmp_path) == elsewhere()


def test_a_run_that_was_stopped_and_followed_saves_no_more(tmp_path):
    run = keep(tmp_path)
    leave(tmp_path, elsewhere())
    with pytest.raises(CheckpointError, match="process 4711 on node7"):
        run.check()


def test_a_removed_folder_is_owned_again(tmp_path):
    run = keep(tmp_path / "save")
    (tmp_path / "save" / FILE).unlink()
    (tmp_path / "save").rmdir()
    run.check()
    assert save_folder.read_owner(tmp_path / "save").is_same_run(this_process())


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_a_folder_that_cannot_be_one_is_refused_with_a_way_out(tmp_path, kind):
    path = tmp_path / "save"
    path.write_text("") if kind == "file" else path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=f"--save {path}: .* no folder.* choose another"):
        keep(path)


def test_the_second_job_is_refused_and_readers_and_restarts_are_not(tmp_path):
    save = tmp_path / "save"
    own = [*FLAGS, "--save", str(save), "--load", str(save), "--max-restarts", "1", "--save-interval", "2"]
    with contextlib.ExitStack() as jobs:

        def start(name, flags):
            folder = ["--run-dir", str(tmp_path / f"run-{name}")]
            job = start_job([*flags, *folder], tmp_path / f"{name}.txt")
            jobs.callback(job.close)
            return job

        first = start("first", own)
        first.wait_for(lambda: (save / publish.TRACKER).exists())
        (worker,) = first.workers()
        second = start("second", own)
        assert second.end() == 1
        reader = start("reader", [*FLAGS, "--load", str(save), "--exit-interval", "2"])
        assert reader.end() == 0
        worker.kill()
        first.wait_for(lambda: len(first.starts()) == 2)
        first.process.send_signal(signal.SIGKILL)
        again = start("again", own)
        again.wait_for(lambda: len(again.starts()) == 1 and "saved" in again.text())
        again.process.send_signal(signal.SIGTERM)
        assert again.end() == 0
    assert f"error: --save {save}: another run saves into it (process {worker.pid} on" in second.text()
    assert "Traceback" not in second.text()
    assert second.text().count("error:") == 1
    assert reader.starts()[0] > 0
    assert [name for name in os.listdir(save) if name.startswith(".")] == []

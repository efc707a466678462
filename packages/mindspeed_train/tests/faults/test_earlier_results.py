"""A start before results that are there is refused, and where it is wanted nothing is lost by it."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from pathlib import Path

import pytest

from mindspeed_core.errors import CheckpointError
from mindspeed_testing.faults import start_job
from mindspeed_train.checkpoint.earlier_results import check_start
from mindspeed_train.checkpoint.manifests import Manifest
from mindspeed_train.checkpoint.publish import FoundCheckpoint
from mindspeed_train.launch import last_save
from mindspeed_train.launch.last_save import LastSave

FLAGS = shlex.split(
    "--platform cpu --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 1 --mock-data --num-workers 0 --lr 1e-3 --eval-iters 0 "
    "--no-progress --lr-decay-style constant"
)


def make_steps(folder, *steps, latest=None):
    for step in steps:
        (folder / f"iter_{step:07d}").mkdir(parents=True)
        (folder / f"iter_{step:07d}" / "manifest.json").write_text("{}")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(latest or steps[-1]))
    return str(folder)


def arguments(**given):
    names = ("load", "save", "run_dir", "ckpt_step")
    return Namespace(
        **{**dict.fromkeys(names), "start_over": False, "finetune": False, **given},
    )


def found(step):
    return FoundCheckpoint(Path(f"iter_{step:07d}"), Manifest(step, {}))


def refusal(start, **given):
    with pytest.raises(CheckpointError) as caught:
        check_start(arguments(**given), start, weights_alone=False)
    return str(caught.value)


def test_a_load_that_holds_nothing_is_refused_beside_later_steps_in_save(tmp_path):
    save = make_steps(tmp_path / "ck", 4, 6)
    said = refusal(None, load="chk", save=save)
    assert said.startswith("--load chk: holds no checkpoint, so the run would start at step 0")
    assert f"--save {save} holds step 6; give --load {save}" in said
    assert "--start-over" in said
    check_start(arguments(load="chk", save=save, start_over=True), None, weights_alone=False)


def test_every_other_start_before_the_latest_step_is_refused(tmp_path):
    save = make_steps(tmp_path / "ck", 6)
    assert "without --load, so" in refusal(None, save=save)
    assert "with the weights of a checkpoint alone" in refusal(
        found(9), load="base", save=save, finetune=True
    )
    assert "--load base: holds step 3, so" in refusal(found(3), load="base", save=save)
    check_start(arguments(load="base", save=save), found(7), weights_alone=False)


def test_going_back_where_it_is_asked_for_is_no_mistake(tmp_path):
    save = make_steps(tmp_path / "ck", 2, 6)
    check_start(arguments(load=save, save=save, ckpt_step=2), found(2), weights_alone=False)
    # As people do it: by hand, in the tracker.
    save = make_steps(tmp_path / "tracked", 2, 6, latest=2)
    check_start(arguments(load=save, save=save), found(2), weights_alone=False)


def test_a_run_folder_remembers_where_its_steps_are_saved(tmp_path):
    checkpoint = tmp_path / "ck" / "iter_0000006"
    checkpoint.mkdir(parents=True)
    last_save.write(tmp_path, LastSave(6, str(checkpoint)))
    # Both names are wrong in the same way, as with a variable of a script.
    typo = {"load": "chk", "save": "chk", "run_dir": str(tmp_path)}
    assert f"holds step 6; give --load {tmp_path / 'ck'}" in refusal(None, **typo)
    checkpoint.rmdir()
    check_start(arguments(**typo), None, weights_alone=False)


def test_records_alone_are_refused_unless_the_same_command_begins_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n')
    assert "holds step 6; check the path" in refusal(None, load="chk", save="ck", run_dir=str(tmp_path))
    # It ended before its first save.
    check_start(arguments(load="ck", save="ck/", run_dir=str(tmp_path)), None, weights_alone=False)


def run(tmp_path, name, *flags):
    own = ["--save", str(tmp_path / "ck"), "--run-dir", str(tmp_path / "run"), "--save-interval", "2"]
    job = start_job([*FLAGS, *own, *flags], tmp_path / name)
    try:
        return job.end(120.0), job.text()
    finally:
        job.close()


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_typo_in_load_moves_nothing_back(tmp_path):
    tracker, record = (
        tmp_path / "ck" / "latest_checkpointed_iteration.txt",
        tmp_path / "run" / "metrics.jsonl",
    )
    assert run(tmp_path, "first", "--train-iters", "6")[0] == 0
    before = record.read_bytes()
    typo = ["--train-iters", "8", "--load", str(tmp_path / "chk")]
    status, said = run(tmp_path, "typo", *typo)
    assert status == 1
    assert "scratch" not in said
    assert f"error: --load {tmp_path / 'chk'}: holds no checkpoint" in said
    assert (record.read_bytes(), tracker.read_text()) == (before, "6")
    status, said = run(tmp_path, "wanted", *typo, "--start-over", "--exit-interval", "2")
    assert status == 0
    assert f"records behind step 0 are in {tmp_path / 'run' / 'metrics.1.jsonl'} now" in said
    assert steps_in(tmp_path / "run" / "metrics.1.jsonl") == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "summary.1.md").exists()
    assert (steps_in(record), tracker.read_text()) == ([1, 2], "2")

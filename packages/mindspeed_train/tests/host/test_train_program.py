"""The program as a user starts it: a run's files, its resume, its exit, one message per failure."""

import json
import os
import subprocess
import sys

import pytest

from mindspeed_testing.faults import start_job

FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 128 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --lr 1e-2 --train-iters 4 "
    "--eval-iters 1 --attention-dropout 0.1 --hidden-dropout 0.1 --log-interval 1 --use-distributed-optimizer"
).split()


def launch(*flags, processes=2, cwd=None):
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, "-m", "mindspeed_core.train", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_CURVES": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=240)


def program(*arguments):
    return launch(*arguments, processes=1)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An undisturbed run, and one that ends after step 2 and is resumed."""
    root = tmp_path_factory.mktemp("program")
    # By torchrun once; the others as forks with the imports behind them.
    whole = launch(*FLAGS, "--run-dir", str(root / "whole"))
    halves = ("--save", str(root / "ckpt"), "--run-dir", str(root / "halves"))
    flags = [*FLAGS, "--nproc", "2", *halves]
    first = start_job([*flags, "--exit-interval", "2"], root / "first.txt")
    assert first.end(240.0) == 0, first.text()
    second = start_job([*flags, "--load", str(root / "ckpt")], root / "second.txt")
    assert second.end(240.0) == 0, second.text()
    return root, whole, second.text()


def test_a_run_leaves_metrics_and_a_loss_curve(runs):
    root, whole, _ = runs
    assert whole.returncode == 0, whole.stderr
    steps = [record for record in records(root / "whole") if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    wanted = {"loss", "learning_rate", "grad_norm", "tokens_per_second", "step_ms", "peak_memory_bytes"}
    assert wanted <= set(steps[0])
    assert (root / "whole" / "loss_curve.png").read_bytes().startswith(b"\x89PNG")


def test_plain_lines_come_once_and_from_one_rank(runs):
    _, whole, _ = runs
    lines = [line for line in whole.stdout.splitlines() if line.startswith("step ")]
    assert sum("| loss " in line for line in lines) == 4
    assert sum("validation loss" in line for line in lines) == 1


def test_a_resumed_run_goes_on_bit_for_bit(runs):
    root, _, second = runs
    assert "from step 2" in second
    keep = ("step", "loss", "grad_norm", "learning_rate")
    undisturbed, resumed = (
        [{name: record[name] for name in keep} for record in records(root / name) if "loss" in record]
        for name in ("whole", "halves")
    )
    assert resumed == undisturbed


def test_an_error_of_every_rank_is_one_message():
    failed = launch(*FLAGS, "--hidden-size", "33")
    assert failed.returncode != 0
    assert failed.stderr.count("--hidden-size 33") == 1


def test_unknown_flags_are_reported_together_with_what_was_meant():
    failed = program(*FLAGS, "--hiden-size", "3", "--use-flash-atn")
    assert failed.returncode == 2
    assert "--hidden-size" in failed.stderr
    assert "--use-flash-attn" in failed.stderr


def test_help_groups_flags_and_starts_nothing():
    shown = program("--help")
    assert shown.returncode == 0
    for text in ("  model ", "  parallelism ", "--tensor-model-parallel-size", "prepare-text"):
        assert text in shown.stdout


def test_plan_only_prints_the_plan():
    shown = program(*FLAGS, "--plan-only")
    assert shown.returncode == 0
    assert "digest" in shown.stdout


def test_an_unknown_command_names_the_closest():
    failed = program("prepare-txt")
    assert failed.returncode == 2
    assert "prepare-text" in failed.stderr

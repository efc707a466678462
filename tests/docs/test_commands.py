"""What the documentation tells people to type works."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from documented_commands import DOCUMENTS, ELSEWHERE, READ_ONLY, TRAINED
from markdown_files import blocks, commands, read
from readme_feature import train_with
from typed_commands import documented, smaller, typed

from mindspeed_core.cli.features import COMMANDS
from mindspeed_testing import run_world

DOCUMENT_COUNT = 1000
"""The default split gives one document in a thousand to the test set."""

TEXT = "The stages of a training run are hooks. A feature wraps or replaces a stage.\n" * 4


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_is_run_here_or_accounted_for(document):
    shown = commands(read(document))

    assert [c for c in shown if c not in READ_ONLY and c not in ELSEWHERE and not c.startswith(TRAINED)] == []


def test_no_account_is_given_of_a_command_that_is_not_shown():
    shown = {command for document in DOCUMENTS for command in commands(read(document))}

    assert set(ELSEWHERE) - shown == set()


@pytest.mark.parametrize("command", READ_ONLY)
def test_the_command_answers(command):
    answer = typed(command)

    assert answer.returncode == 0, answer.stderr
    assert READ_ONLY[command] in answer.stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_sub_command_that_prose_mentions_exists(document):
    mentioned = re.findall(r"`mindspeed-features ([a-z][a-z-]*)", read(document))

    assert set(mentioned) - {*COMMANDS, "acme-size"} == set()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The README's section on training, typed in an empty folder with a text of one's own."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my_text").mkdir()
    for number in range(DOCUMENT_COUNT):
        (folder / "my_text" / f"{number}.txt").write_text(TEXT)
    prepared = typed(smaller(documented("README.md", "mindspeed-train prepare-text ")), folder)
    assert prepared.returncode == 0, prepared.stderr
    training = typed(smaller(documented("README.md", "torchrun --standalone ")), folder)
    assert training.returncode == 0, training.stderr + training.stdout
    return folder, training.stdout + training.stderr


def test_the_readmes_training_logs_every_step_and_draws_its_curve(trained):
    folder, _ = trained
    lines = [json.loads(line) for line in (folder / "runs/first/metrics.jsonl").read_text().splitlines()]

    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert (folder / "runs/first/loss_curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_readmes_training_runs_with_two_ranks_and_three_features(trained):
    folder, output = trained

    assert "world 2 = tp 2" in output
    assert "features: flash-attn, fused-rmsnorm, fused-swiglu" in output
    assert any((folder / "checkpoints").iterdir())


def test_the_cluster_command_of_the_questions_is_understood_by_both_programs():
    from torch.distributed.run import get_args_parser

    launcher = get_args_parser().parse_args(
        shlex.split(documented("docs/faq.md", "torchrun --nnodes 2 "))[1:]
    )
    planned = typed(shlex.join(["mindspeed-features", "plan", "--", *launcher.training_script_args]))

    assert (launcher.nnodes, launcher.node_rank, launcher.module) == ("2", 0, True)
    assert launcher.training_script == "mindspeed_core.train"
    assert planned.returncode == 0, planned.stdout + planned.stderr


def test_the_feature_of_the_readme_logs_its_number(tmp_path):
    (block,) = blocks(read("README.md"), "python")
    ((logged,),) = run_world(train_with, 1, block.text, str(tmp_path))

    assert logged["norm_per_loss"] == pytest.approx(logged["grad_norm"] / logged["loss"])

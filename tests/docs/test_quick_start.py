"""The quick start, typed from its first to its last training command in an empty folder."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from markdown_files import ROOT, commands, read
from typed_commands import smaller, typed

pytestmark = pytest.mark.thorough

PAGE = "docs/quick-start.md"
STEPS = ("prepare-text", "--nproc 2", "--data-path", "inspect", "sample")
"""How the commands go on after the program's name, in the order in which the page gives them."""

Answers = dict[str, "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """The folder after the last command, and what each command answered."""
    folder = tmp_path_factory.mktemp("quick_start")
    (folder / "docs").symlink_to(ROOT / "docs")
    shown = [command for command in commands(read(PAGE)) if command.startswith("mindspeed-train ")]
    assert [command.split(" ", 1)[1].startswith(step) for command, step in zip(shown, STEPS)] == [True] * 5
    answers = {}
    for command, step in zip(shown, STEPS):
        answers[step] = typed(smaller(command), folder)
        assert answers[step].returncode == 0, answers[step].stdout + answers[step].stderr
    return folder, answers


def steps(path: Path) -> list[int]:
    lines = (json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "loss" in line]


def test_the_first_run_trains_on_two_processes_with_the_plugins_kernels(followed):
    folder, answers = followed

    assert steps(folder / "runs/first") == [1]
    said = answers["--nproc 2"].stdout + answers["--nproc 2"].stderr
    assert "world 2 = tp 2" in said
    assert "flash-attn, fused-rmsnorm, fused-swiglu" in said


def test_the_second_run_goes_on_with_another_layout(followed):
    folder, _ = followed

    assert steps(folder / "runs/second") == [2]


def test_the_checkpoint_is_intact_and_the_model_continues_the_prompt(followed):
    _, answers = followed

    assert "all files unchanged" in answers["inspect"].stdout
    assert "A feature is" in answers["sample"].stdout


def test_two_processes_that_share_the_model_continue_the_prompt_alike(followed):
    folder, answers = followed
    (command,) = [c for c in commands(read(PAGE)) if c.startswith("mindspeed-train sample ")]

    shared = smaller(command).replace("mindspeed-train sample", "mindspeed-train --nproc 2 sample")
    answer = typed(f"{shared} --tensor-model-parallel-size 2", folder)

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == answers["sample"].stdout

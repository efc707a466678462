"""``mindspeed-models run``: what each step stands for, as a script and as processes."""

import shlex
import subprocess

import pytest

from mindspeed_models.program import main
from mindspeed_models.running import script
from mindspeed_models.running.sheets import find_sheet
from mindspeed_models.running.steps import MODELS, STEPS, TRAIN, Asked, Command


def printed(capsys, *words):
    assert main(["run", *words, "--print"]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    assert main(["run", *words]) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_a_script_that_a_shell_reads(capsys, tmp_path, step):
    sources = ("--corpus", "texts.jsonl", "--instructions", "it's.json", "--prompts", "it's.txt")
    sources += ("--task", "boolq=data/boolq")
    script = printed(capsys, "tiny-llama2", step, "--work-dir", str(tmp_path / "my work"), *sources)
    assert script.startswith("#!/usr/bin/env bash\nset -euo pipefail\nmindspeed-")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    assert any("my work" in word for word in words)


def test_a_chain_leads_from_folder_to_folder(capsys, tmp_path):
    work = str(tmp_path)
    words = {
        step: shlex.split(
            printed(
                capsys,
                *("llama2-7b", step, "--work-dir", work, "--corpus", "a", "--hf-dir", "hub"),
                *("--prompts", "b", "--task", "boolq=c"),
            ).replace("\\\n", " ")
        )
        for step in STEPS
    }

    def value(step, flag):
        return words[step][words[step].index(flag) + 1]

    assert value("convert", "--input-model-dir") == "hub"
    assert value("pretrain", "--pretrained-checkpoint") == value("convert", "--output-model-dir")
    assert value("finetune", "--pretrained-checkpoint") == value("pretrain", "--save")
    assert value("lora", "--pretrained-checkpoint") == value("finetune", "--save")
    assert (value("merge", "--load"), value("merge", "--lora-load")) == (
        value("finetune", "--save"),
        value("lora", "--save"),
    )
    trained = value("merge", "--save")
    assert value("export", "--load") == value("generate", "--load") == value("evaluate", "--load") == trained
    assert value("generate", "--nproc") == value("evaluate", "--nproc") == "8"
    assert (value("generate", "--prompt-file"), value("evaluate", "--task-data-path")) == ("b", "boolq=c")
    assert value("lora", "--nproc") == "8"
    assert value("lora", "--tokenizer-model") == "hub"


def test_several_machines_start_torchrun(capsys, tmp_path):
    flags = ("--work-dir", str(tmp_path), "--devices", "64", "--nproc", "8", "--platform", "npu")
    script = printed(capsys, "llama2-70b", "pretrain", *flags)
    assert 'torchrun --nnodes 8 --nproc-per-node 8 --node-rank "$NODE_RANK"' in script
    assert "--platform npu" in script
    assert "--nproc 8" not in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_several_machines_ask_a_model_by_its_own_program(capsys, tmp_path):
    flags = ("--work-dir", str(tmp_path), "--devices", "16", "--nproc", "8", "--prompts", "texts.txt")
    script = printed(capsys, "llama2-70b", "generate", *flags)
    assert "-m mindspeed_models.program generate" in script
    assert "--nproc 8" not in script


def test_each_command_is_announced_when_it_begins(capfd, monkeypatch, tmp_path):
    lines = []
    commands = [
        Command(MODELS, ("preprocess", "--input", "a.json", "--append-eod")),
        Command(TRAIN, ("prepare-text", "books.jsonl", "--output-prefix", "data")),
        Command(TRAIN, ("--model-config", "work/model", "--bf16")),
    ]

    def run(words):
        lines.append(capfd.readouterr().err)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(script.subprocess, "run", run)
    assert script.execute(commands, Asked(find_sheet("tiny-llama2"), tmp_path)) == 0
    assert lines == [
        "mindspeed-models preprocess --input a.json …\n",
        "mindspeed-train prepare-text books.jsonl …\n",
        "mindspeed-train --model-config work/model …\n",
    ]


def test_a_prompt_of_the_command_line_is_shown_and_not_written(capsys, tmp_path):
    words = ("tiny-llama2", "generate", "--work-dir", str(tmp_path), "--print", "--", "--prompt", "it saw")
    assert main(["run", *words]) == 0
    script = capsys.readouterr().out
    assert script.endswith("--prompt 'it saw'\n")
    assert "--output" not in script


def test_instructions_take_the_tokenizer_that_was_trained_before(capsys, tmp_path):
    file = tmp_path / "tokenizer" / "text.tokenizer.json"
    file.parent.mkdir()
    file.write_text("{}")
    flags = ("--work-dir", str(tmp_path), "--instructions", "records.jsonl")
    script = printed(capsys, "tiny-llama2", "preprocess", *flags)
    assert f"--tokenizer-name-or-path {file}" in script.replace("\\\n", "").replace("  ", " ")
    assert "prepare-text" not in script


def test_further_flags_come_last_and_win(capsys, tmp_path):
    words = ("tiny-llama2", "pretrain", "--work-dir", str(tmp_path), "--print", "--", "--train-iters", "3")
    assert main(["run", *words]) == 0
    assert capsys.readouterr().out.endswith("--train-iters 3\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama2-13b", "preprocess"), "there is nothing to prepare; name texts with --corpus"),
        (("tiny-llama2", "preprocess", "--instructions", "x"), "there is no tokenizer"),
        (("llama2-70b", "pretrain", "--nproc", "8"), "need at least 32 devices"),
        (("llama2-70b", "pretrain", "--devices", "32", "--nproc", "5"), "is no multiple of --nproc 5"),
        (("llama2-70b", "pretrain", "--devices", "32"), "write the script with --print"),
        (("tiny-llama2", "generate"), "there is nothing to continue; name a file of prompts with --prompts"),
        (("tiny-llama2", "evaluate"), "name a benchmark with its data by --task NAME=PATH"),
        (("tiny-llama2", "evaluate", "--task", "boolq"), "--task boolq: names no data"),
        (("llama2", "pretrain"), "say which size with --size"),
    ],
)
def test_a_step_that_cannot_be_done_is_one_sentence(capsys, words, said):
    text = refused(capsys, *words)
    assert said in text
    assert "Traceback" not in text


def test_a_failing_step_ends_with_its_status(capfd, tmp_path):
    assert main(["run", "tiny-llama2", "merge", "--work-dir", str(tmp_path)]) == 2
    assert "does not exist" in capfd.readouterr().err


def test_help_lists_steps_and_models(capsys):
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(step in text for step in STEPS)
    assert "llama2-13b" in text

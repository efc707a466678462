"""``mindspeed-train --help``: families on one screen, one family, one flag; completion in a shell."""

from __future__ import annotations

import sys

import pytest
from made_packages import feature_source

from mindspeed_train.program import main
from mindspeed_train.program_help import HELP, HELP_FLAG, family_name, requested_topic

ADOPTING = """
flags = (
    Flag("--thing-a", help="Ask for it.", since="0.4"),
    Flag("--lr-decay-style", type=str, choices=("steps",), help="Fall in steps."),
    Flag("--seed", type=int, default=4, help="A good one."),
)
"""


@pytest.fixture
def said(capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_the_short_help_names_every_family_on_one_screen(said, install):
    install("pack-a", feature_source("thing-a", family="spinning-tops"))

    status, shown, _ = said("--help")

    assert status == 0
    assert len(shown.splitlines()) <= 50
    for text in ("  model ", "  data ", "  spinning-tops ", "prepare-text", "--help FAMILY", "--help-flag"):
        assert text in shown


def test_the_bare_program_says_what_to_type_on_ten_lines(said):
    status, shown, _ = said()

    assert status == 0
    assert len(shown.splitlines()) == 10
    assert max(map(len, shown.splitlines())) <= 80
    assert "mindspeed-train --help" in shown


def test_help_imports_neither_torch_nor_megatron(said):
    loaded = {name for name in ("torch", "megatron.core") if name in sys.modules}
    said("--help")
    said("--help", "model")
    said("--help-flag", "num-layers")

    assert {name for name in ("torch", "megatron.core") if name in sys.modules} == loaded


@pytest.mark.parametrize(
    "asked", [("--help", "model"), ("--help=model",), ("help", "model"), ("-h", "model")]
)
def test_a_family_is_listed_whole(said, asked):
    status, shown, _ = said(*asked)

    assert status == 0
    assert "--num-layers N" in shown
    assert "--data-path" not in shown


def test_a_word_lists_the_families_that_have_it_and_a_feature_its_flags(said, install):
    install("pack-a", feature_source("thing-a", ADOPTING))

    by_word = said("--help", "tolerance")[1]
    of_feature = said("--help", "thing-a")[1]

    assert "--exit-signal" in by_word
    assert "--thing-a" in of_feature
    assert "--lr-decay-style" in of_feature
    assert "--num-layers" not in of_feature


def test_all_lists_every_flag(said):
    shown = said("--help", "all")[1]

    assert "--num-layers" in shown
    assert "--save-interval" in shown


def test_a_misspelled_family_gets_a_suggestion(said):
    status, _, error = said("--help", "modle")

    assert status == 2
    assert "did you mean model" in error


@pytest.mark.parametrize("asked", [("--help-flag", "--seed"), ("--help-flag=seed",), ("--help-flag", "seed")])
def test_a_flag_is_explained_with_default_source_readers_and_since(said, install, asked):
    install("pack-a", feature_source("thing-a", ADOPTING))

    status, shown, _ = said(*asked)

    assert status == 0
    for text in (
        "--seed N",
        "default     1234; 4 with thing-a",
        "source      host standalone; a flag of Megatron-LM",
        "read by     host standalone; feature thing-a",
        "since       the first release of mindspeed-train",
        "argument    args.seed",
    ):
        assert text in shown


def test_choices_are_those_of_the_host_and_of_features_and_since_is_the_declared_version(said, install):
    install("pack-a", feature_source("thing-a", ADOPTING))

    style = said("--help-flag", "lr_decay_style")[1]
    own = said("--help-flag", "thing-a")[1]

    assert "value       constant, linear, cosine" in style
    assert "steps" in style
    assert "source      feature thing-a of pack-a" in own
    assert "since       pack-a 0.4" in own


def test_the_field_of_megatron_core_that_a_flag_fills_is_named(said):
    assert "TransformerConfig.num_layers" in said("--help-flag", "num-layers")[1]


def test_an_unknown_flag_is_answered_as_in_a_training(said):
    status, _, error = said("--help-flag", "--hiden-size")

    assert status == 2
    assert "--hidden-size" in error


def test_no_feature_may_take_the_flag_that_explains_flags(install, features):
    install("pack-a", feature_source("thing-a", 'flags = (Flag("--help-flag"),)'))

    assert "--help-flag is reserved" in features("list", "--broken").output


@pytest.mark.parametrize(
    ("arguments", "topic"),
    [
        (["--num-layers", "2"], None),
        (["--num-layers", "2", "--help"], (HELP[0], "")),
        (["--help", "--num-layers", "2"], (HELP[0], "")),
        (["--nproc", "2", "-h", "data"], (HELP[0], "data")),
        (["--help-flag", "--lr"], (HELP_FLAG, "--lr")),
        (["--help-flag"], (HELP_FLAG, "")),
    ],
)
def test_help_is_asked_for_anywhere(arguments, topic):
    assert requested_topic(arguments) == topic


@pytest.mark.parametrize(
    ("heading", "name"),
    [
        ("mindspeed-core", "core"),
        ("mindspeed-moe 0.1.0: moe", "moe"),
        ("megatron-core: model", "megatron-core-model"),
        ("optimizer and schedule", "optimizer-and-schedule"),
    ],
)
def test_families_have_names_that_one_can_type(heading, name):
    assert family_name(heading) == name


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("in", {"inspect"}),
        ("--num-la", {"--num-layers", "--num-layers-per-virtual-pipeline-stage"}),
        ("--data-path a b --lr-decay-style co", {"constant", "cosine"}),
        ("inspect --ver", {"--verify"}),
    ],
)
def test_bash_completes_commands_flags_choices_and_options_of_commands(monkeypatch, said, typed, offered):
    words = f"mindspeed-train {typed}"
    monkeypatch.setenv("_MINDSPEED_TRAIN_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))

    status, shown, error = said()

    assert (status, error) == (0, "")
    assert offered <= {line.partition(",")[2] for line in shown.split()}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_that_asks_the_program(said, shell):
    status, shown, _ = said("completion", shell)

    assert status == 0
    assert "_MINDSPEED_TRAIN_COMPLETE" in shown


def test_another_shell_is_refused_with_those_that_there_are(said):
    status, _, error = said("completion", "tcsh")

    assert status == 2
    assert "bash, zsh, fish" in error

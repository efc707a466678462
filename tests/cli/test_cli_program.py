"""The program itself: lazy and foreign sub-commands, help, errors, completion."""

from __future__ import annotations

import gc
import os
import sys
from types import ModuleType

import click
import pytest
from made_packages import feature_source, write_metadata

import mindspeed_core
from mindspeed_core.cli.features import COMMANDS, main
from mindspeed_core.errors import SessionError, UserError
from mindspeed_core.terminal.errors import describe, guarded


def test_version_is_the_package_version(features):
    assert mindspeed_core.__version__ in features("--version").output


def test_the_end_of_the_program_searches_for_no_garbage(monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    main(["--version"])
    assert frozen == []

    monkeypatch.setattr(sys, "argv", ["mindspeed-features", "--version"])
    main()
    assert frozen == [True]


def test_help_lists_every_sub_command(features):
    output = features("--help").output

    assert [name for name in COMMANDS if f"\n  {name} " not in output] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_sub_command_explains_itself(features, name):
    result = features(name, "--help")

    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 4


def test_a_misspelled_sub_command_gets_a_suggestion(features):
    result = features("lst")

    assert result.exit_code == 2
    assert "Did you mean list" in result.output


def _foreign(tmp_path, on_path, dist, source):
    site = tmp_path / dist
    site.mkdir()
    package = dist.replace("-", "_")
    (site / f"{package}.py").write_text(source)
    write_metadata(site, dist, {"mindspeed.commands tune": f"{package}:tune"})
    on_path(site)


def test_a_package_adds_a_sub_command(features, tmp_path, on_path):
    source = "import click\n@click.command()\ndef tune():\n    click.echo('tuning')\n"
    _foreign(tmp_path, on_path, "tune-pack", source)

    assert "tuning" in features("tune").output
    assert "tune-pack 0.1.0" in features("--help").output


def test_help_does_not_import_foreign_sub_commands(features, tmp_path, on_path):
    _foreign(tmp_path, on_path, "lazy-pack", "tune = None")

    features("--help")

    assert "lazy_pack" not in sys.modules


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import nowhere_at_all", "nowhere_at_all"),
        ("tune = 3", "no click command"),
        ("exit(3)", "SystemExit"),
    ],
)
def test_a_broken_foreign_sub_command_names_its_package_and_leaves_others_alone(
    features, tmp_path, on_path, source, complaint
):
    _foreign(tmp_path, on_path, "bad-pack", source)

    result = features("tune")

    assert result.exit_code == 1
    assert "bad-pack 0.1.0" in result.output
    assert complaint in result.output
    assert "pip uninstall bad-pack" in result.output
    assert features("list").exit_code == 0


def test_two_packages_that_claim_one_sub_command_are_both_named(features, tmp_path, on_path):
    source = "import click\n@click.command()\ndef tune():\n    pass\n"
    _foreign(tmp_path, on_path, "pack-one", source)
    _foreign(tmp_path, on_path, "pack-two", source)

    output = features("tune").output

    assert "pack-one 0.1.0" in output
    assert "pack-two 0.1.0" in output


def test_a_user_error_inside_a_sub_command_is_one_message(features, tmp_path, on_path):
    source = (
        "import click\nfrom mindspeed_core.errors import UserError\n"
        "@click.command()\ndef tune():\n    raise UserError('--x 3: too small; use 4')\n"
    )
    _foreign(tmp_path, on_path, "tune-pack", source)

    result = features("tune")

    assert result.exit_code == 1
    assert result.output.strip() == "error: --x 3: too small; use 4"


def test_wrong_usage_is_one_message_with_the_way_to_the_help(capsys):
    from mindspeed_core.cli.features import main

    assert main(["list", "--famly"]) == 2
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("error: No such option")
    assert last == "    -> mindspeed-features list --help"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(features, shell):
    output = features("completion", shell).output

    assert "_MINDSPEED_FEATURES_COMPLETE" in output
    assert "mindspeed-features" in output


def test_feature_names_are_completed(install, features, monkeypatch):
    from mindspeed_core.terminal.feature_names import complete_features

    install("pack-a", feature_source("thing-a"))
    parameter = click.Argument(["name"])

    found = complete_features(click.Context(click.Command("show")), parameter, "thing")

    assert [item.value for item in found] == ["thing-a"]


def test_bash_gets_completions_from_the_program_itself(monkeypatch, capsys):
    monkeypatch.setenv("_MINDSPEED_FEATURES_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "mindspeed-features do")
    monkeypatch.setenv("COMP_CWORD", "1")

    assert main([]) == 0
    assert capsys.readouterr().out.split() == ["plain,doctor"]


def test_main_returns_the_exit_status(capsys):
    assert [main(["list"]), main(["show", "no-such-feature"]), main(["lst"])] == [0, 2, 2]
    assert "Traceback" not in capsys.readouterr().err


def test_notes_are_part_of_the_message():
    error = UserError("no such file")
    error.__notes__ = ["mindspeed: raised in stage 'build_datasets'"]

    assert describe(error) == "no such file\nmindspeed: raised in stage 'build_datasets'"


def _raises(error):
    def run():
        raise error

    return run


def test_an_explained_error_ends_a_program_with_status_1_and_no_traceback(capsys):
    assert guarded(_raises(SessionError("opened twice"))) == 1
    assert capsys.readouterr().err == "error: opened twice\n"


def test_an_unexpected_error_keeps_its_traceback_and_its_notes(capsys):
    error = ZeroDivisionError("division by zero")
    error.__notes__ = ["mindspeed: raised in stage 'train_step'"]

    assert guarded(_raises(error)) == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.count("raised in stage 'train_step'") == 1


def test_a_program_whose_import_of_torch_was_interrupted_leaves_at_once(capsys, monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setitem(sys.modules, "torch.half", ModuleType("torch.half"))
    assert guarded(_raises(KeyboardInterrupt())) == 130
    assert left == [130]
    assert "interrupted" in capsys.readouterr().err


def test_an_interrupted_program_says_so(capsys):
    assert guarded(_raises(KeyboardInterrupt())) == 130
    assert "interrupted" in capsys.readouterr().err

"""Sub-commands and programs that another distribution of the project brings."""

import runpy
import signal
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

import mindspeed_core
from mindspeed_core.cli import commands
from mindspeed_core.discovery.entry_points import Source
from mindspeed_core.errors import UserError


def test_a_command_of_a_distribution_that_is_absent_says_what_to_install():
    with pytest.raises(UserError, match="mindspeed-features prove comes with acme-proofs: pip install acme"):
        commands.load_own("prove", "acme-proofs")


def test_a_listed_command_comes_from_the_distribution_that_is_named(monkeypatch):
    claims = [
        Source("acme-proofs", "1", "prove", f"{__name__}:prove"),
        Source("somebody-else", "1", "prove", f"{__name__}:other"),
    ]
    monkeypatch.setattr(commands, "Installed", lambda: SimpleNamespace(sources=lambda group: claims))

    assert commands.load_own("prove", "acme-proofs") is prove


def test_words_of_training_are_few_without_its_host():
    assert commands.train_words(SimpleNamespace(host_names=tuple)) == {"help", "completion"}


def test_the_module_of_training_says_what_to_install(monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda **selected: ())
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)

    with pytest.raises(SystemExit, match=r"pip install 'mindspeed-core\[train\]'"):
        runpy.run_path(str(Path(mindspeed_core.__file__).with_name("train.py")), run_name="__main__")


@click.command()
def prove():
    """Prove nothing."""


@click.command()
def other():
    """Do something else."""

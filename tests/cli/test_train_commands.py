"""Sub-commands that packages add to ``mindspeed-train``, in one process and in several."""

from __future__ import annotations

import json
import sys

import pytest
from made_packages import write_metadata

from mindspeed_core.cli import features as features_program
from mindspeed_testing.faults import start_job
from mindspeed_train.program import main

TUNE = """
import sys
import click
from mindspeed_core.errors import UserError
from mindspeed_train.launch.commands import parallel_command

@click.command()
@click.option("--end", default="well")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def tune(end, words):
    '''Tune something.'''
    print("tuning", *words)
    if end == "status":
        return 3
    if end == "exit":
        click.get_current_context().exit(4)
    if end == "explained":
        raise UserError("--x 3: too small; use 4")
"""

TALK = """
import os
import signal
import click
from mindspeed_core.errors import UserError
from mindspeed_train.launch.commands import parallel_command

@parallel_command
@click.command()
@click.option("--end", default="well", type=click.Choice(["well", "status", "explained", "killed"]))
def talk(end):
    '''Add up the ranks.'''
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(total)
    if end == "killed" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "killed":
        dist.barrier()
    if end == "explained":
        raise UserError("--x 3: too small; use 4")
    click.echo(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g}")
    dist.destroy_process_group()
    return 3 if end == "status" else 0
"""


@pytest.fixture
def add_command(tmp_path, on_path):
    def add(dist: str, source: str, name: str = "tune", attribute: str = "tune"):
        site = tmp_path / dist
        site.mkdir()
        package = dist.replace("-", "_")
        (site / f"{package}.py").write_text(source)
        write_metadata(site, dist, {f"mindspeed.train_commands {name}": f"{package}:{attribute}"})
        return on_path(site)

    return add


def test_a_package_adds_a_command_that_takes_words_and_flags_of_its_own(add_command, capsys):
    add_command("tune-pack", TUNE)

    assert main(["tune", "--", "--num-layers", "2", "help"]) == 0
    assert capsys.readouterr().out == "tuning --num-layers 2 help\n"


def test_help_lists_the_command_with_its_package_and_imports_nothing_of_it(add_command, capsys):
    add_command("tune-pack", "raise RuntimeError('no such driver')")

    assert main(["--help"]) == 0
    assert "\n  tune          of tune-pack 0.1.0\n" in capsys.readouterr().out
    assert "tune_pack" not in sys.modules


def test_list_names_the_command_its_program_and_its_package(add_command, features):
    add_command("tune-pack", TUNE)
    add_command("taken-pack", TUNE, name="sample")

    output = features("list", "--all").output

    assert "sub-command mindspeed-train tune: tune-pack 0.1.0\n" in output
    assert "sub-command mindspeed-train sample: taken-pack 0.1.0 (never runs: the program has one" in output
    assert {"program": "mindspeed-train", "name": "tune", "package": "tune-pack 0.1.0", "trouble": ""} in (
        json.loads(features("list", "--json").output)["commands"]
    )


@pytest.mark.parametrize(("end", "status"), [("well", 0), ("status", 3), ("exit", 4), ("explained", 1)])
def test_the_exit_status_is_the_commands(add_command, capsys, end, status):
    add_command("tune-pack", TUNE)

    assert main(["tune", "--end", end]) == status
    assert capsys.readouterr().err == ("error: --x 3: too small; use 4\n" if end == "explained" else "")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import nowhere_at_all", "nowhere_at_all"),
        ("tune = 3", "no click command"),
        ("exit(3)", "SystemExit"),
    ],
)
def test_a_broken_command_names_its_package_and_leaves_training_alone(add_command, capsys, source, complaint):
    add_command("bad-pack", source)

    assert main(["tune"]) == 1
    said = capsys.readouterr().err
    assert "bad-pack 0.1.0" in said
    assert complaint in said
    assert "Traceback" not in said
    assert main(["--num-layers", "2", "--platform", "cpu", "--plan-only"]) == 0


def test_two_packages_that_claim_one_command_are_both_named(add_command, capsys):
    add_command("pack-one", TUNE)
    add_command("pack-two", TUNE)

    assert main(["tune"]) == 1
    assert "pack-one 0.1.0 and pack-two 0.1.0" in capsys.readouterr().err


def test_the_programs_own_commands_cannot_be_taken(add_command, capsys):
    add_command("tune-pack", TUNE, name="inspect")

    assert main(["inspect", "--help"]) == 0
    assert "CHECKPOINT" in capsys.readouterr().out


def test_wrong_usage_of_a_command_is_a_message_and_status_2(capsys):
    assert main(["inspect"]) == 2
    said = capsys.readouterr().err
    assert "Missing argument 'CHECKPOINT'" in said
    assert "Traceback" not in said


def test_a_word_that_is_no_command_is_refused_behind_nproc_too(add_command, capsys):
    add_command("tune-pack", TUNE)

    assert main(["--nproc", "2", "tunne"]) == 2
    assert "Did you mean tune?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--nproc", "2"], "--nproc 2: the command tune works in one process"),
        (["--nproc=0"], "--nproc 0: must be at least 1"),
        (["--nproc", "2", "--max-restarts", "1"], "--max-restarts 1: the command tune is not started again"),
    ],
)
def test_what_a_command_cannot_do_with_processes_is_refused(add_command, capsys, flags, complaint):
    add_command("tune-pack", TUNE)

    assert main([*flags, "tune"]) == 2
    assert complaint in capsys.readouterr().err


def test_a_command_of_the_other_program_is_named_with_its_program(add_command, capsys):
    add_command("tune-pack", TUNE)

    assert main(["doctor"]) == 2
    assert "Did you mean mindspeed-features doctor?" in capsys.readouterr().err
    for name in ("inspect", "tune"):
        assert features_program.main([name]) == 2
        assert f"Did you mean mindspeed-train {name}?" in capsys.readouterr().err


def test_a_value_of_a_training_flag_is_no_command(add_command, capsys):
    add_command("tune-pack", TUNE)

    assert main(["--platform", "tune", "--plan-only"]) == 2
    assert "tuning" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    """Run the command in two processes that add up their ranks."""
    site = tmp_path_factory.mktemp("talk")
    (site / "talk_pack.py").write_text(TALK)
    write_metadata(site, "talk-pack", {"mindspeed.train_commands talk": "talk_pack:talk"})
    sys.path.insert(0, str(site))

    def run(*arguments: str) -> tuple[int, str]:
        job = start_job(["--nproc", "2", "talk", *arguments], site / "output.txt")
        return job.end(240.0), job.text()

    yield run
    sys.path.remove(str(site))


def test_processes_of_a_command_form_a_process_group_and_hand_on_their_status(talk):
    status, output = talk("--end", "status")

    assert sorted(output.splitlines()) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]
    assert status == 3


def test_an_error_of_every_process_is_one_message_with_a_traceback_where_wanted(talk):
    status, output = talk("--end", "explained", "--traceback")

    assert status == 1
    assert output.count("UserError: --x 3: too small; use 4") == 1
    assert "talk_pack.py" in output


def test_a_killed_process_ends_the_command_and_is_named(talk):
    status, output = talk("--end", "killed")

    assert status == 1
    assert "error: rank 1 of 2 was killed by SIGKILL" in output


def test_wrong_usage_in_several_processes_is_said_once(talk):
    status, output = talk("--end", "badly")

    assert status == 2
    assert output.count("Invalid value for '--end'") == 1


def test_a_worker_of_a_training_prints_its_traceback_where_wanted(tmp_path):
    flags = "--platform cpu --num-layers 2 --hidden-size 33 --num-attention-heads 2 --seq-length 8"
    flags += f" --micro-batch-size 1 --train-iters 1 --mock-data --vocab-size 16 --run-dir {tmp_path}"
    said = {}
    for wanted in ([], ["--traceback"]):
        job = start_job(["--nproc", "2", *flags.split(), *wanted], tmp_path / f"output{len(wanted)}.txt")
        assert job.end(240.0) == 1
        said[bool(wanted)] = job.text()

    assert "--hidden-size" in said[False]
    assert "Traceback" not in said[False]
    assert said[True].count("Traceback (most recent call last)") == 1


def test_list_prints_the_traceback_of_a_broken_plugin_where_wanted(install, capsys):
    install("bad-pack", "def deep():\n    raise RuntimeError('no such driver')\n\ndeep()\n")

    assert features_program.main(["list"]) == 0
    assert "in deep" not in capsys.readouterr().out
    assert features_program.main(["list", "--traceback"]) == 0
    assert "in deep" in capsys.readouterr().out


def test_both_programs_take_traceback_off_the_command_line(capsys):
    assert features_program.main(["show", "no-such-feature"]) == 2
    plain = capsys.readouterr().err
    assert features_program.main(["show", "no-such-feature", "--traceback"]) == 2
    full = capsys.readouterr().err
    assert main(["--traceback", "--num-layers", "two", "--plan-only"]) == 2
    training = capsys.readouterr().err

    assert plain.startswith("error: no feature 'no-such-feature'")
    assert full.startswith("Traceback")
    assert "feature_names.py" in full
    assert training.startswith("Traceback")
    assert main(["--nproc", "x", "--plan-only"]) == 2
    assert "Traceback" not in capsys.readouterr().err

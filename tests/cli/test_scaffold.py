"""``new``: what it writes installs, is listed, documented and tested as it comes; it never overwrites."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_testing.scaffold import ScaffoldError, create_plugin, plugin_names


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Acme",
        "acme_losses",
        "acme--losses",
        "-acme",
        "acme-",
        "2fast",
        "acme losses",
        "../acme",
        "acmé",
        "a.b",
    ],
)
def test_a_name_that_cannot_be_a_distribution_and_a_package_is_refused(name):
    with pytest.raises(ScaffoldError, match="lower-case words"):
        plugin_names(name)


@pytest.mark.parametrize("name", ["class", "json", "match", "torch", "mindspeed-core"])
def test_a_name_that_is_taken_is_refused(name):
    with pytest.raises(ScaffoldError, match=r"another name|prefix of yours"):
        plugin_names(name)


def test_an_existing_directory_is_left_alone(features, tmp_path):
    kept = tmp_path / "acme-losses" / "notes.txt"
    kept.parent.mkdir()
    kept.write_text("mine")

    result = features("new", "acme-losses", "--path", str(tmp_path))

    assert result.exit_code == 1
    assert "nothing is overwritten" in result.output
    assert [path.name for path in kept.parent.iterdir()] == ["notes.txt"]


def test_a_missing_parent_directory_is_one_message(features, tmp_path):
    result = features("new", "acme-losses", "--path", str(tmp_path / "absent"))

    assert result.exit_code == 1
    assert "no such directory" in result.output


def test_the_command_lists_what_it_wrote_and_what_comes_next(features, tmp_path):
    output = features("new", "acme-losses", "--path", str(tmp_path)).output

    listed = {line.strip() for line in output.splitlines()}
    written = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert written <= listed
    assert f"pip install -e {tmp_path / 'acme-losses'}" in listed


def test_no_placeholder_is_left_and_every_module_parses(tmp_path):
    written = create_plugin("acme-losses", tmp_path)

    assert [path for path in written if re.search(r"\$\w|__package__", str(path) + path.read_text())] == []
    for path in written:
        if path.suffix == ".py":
            ast.parse(path.read_text())


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A generated plugin, built and installed by pip into a directory of its own, without network."""
    parent = tmp_path_factory.mktemp("plugins")
    create_plugin("acme-losses", parent)
    site = parent / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
    ]
    subprocess.run([*command, "--target", str(site), str(parent / "acme-losses")], check=True)
    return parent / "acme-losses", site


def _run(installed, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    plugin, site = installed
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd or plugin,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _features(installed, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(installed, "-m", "mindspeed_core.cli.features", *arguments)


def test_the_generated_plugin_has_everything_that_a_published_one_needs(installed):
    plugin, _ = installed
    written = {str(p.relative_to(plugin)) for p in plugin.rglob("*") if p.is_file()}

    assert {
        ".github/workflows/tests.yml",
        ".gitignore",
        "README.md",
        "noxfile.py",
        "pyproject.toml",
        "src/acme_losses/docs/loss_average.md",
        "src/acme_losses/py.typed",
        "tests/test_contract.py",
    } <= written


def test_the_generated_files_are_clean_by_their_own_configuration(installed):
    for command in (["check", "--no-cache", "."], ["format", "--no-cache", "--check", "."]):
        done = _run(installed, "-m", "ruff", *command)

        assert done.returncode == 0, done.stdout + done.stderr


def test_the_generated_tasks_run_the_contract(installed):
    plugin, _ = installed
    source = (plugin / "noxfile.py").read_text()

    assert '"--contract", "acme-losses"' in source
    assert "nox -s contract" in (plugin / ".github" / "workflows" / "tests.yml").read_text()


def test_the_generated_plugin_is_listed_without_a_complaint(installed):
    done = _features(installed, "list", "--family", "acme-losses")

    assert done.returncode == 0, done.stderr
    assert "acme-losses-loss-average" in done.stdout
    assert "broken" not in done.stdout


def test_the_generated_documentation_travels_with_the_package(installed):
    page = _features(installed, "show", "acme-losses-loss-average", "--page")
    shown = _features(installed, "show", "acme-losses-loss-average", "--proofs")

    assert "the first\nloss is the first average" in page.stdout
    assert "equal bit for bit" in shown.stdout


def test_the_generated_feature_is_planned_and_checks_its_flag(installed):
    good = _features(installed, "plan", "--platform", "cpu", "--", "--acme-losses-loss-average", "0.9")
    bad = _features(installed, "plan", "--platform", "cpu", "--", "--acme-losses-loss-average", "1.5")

    assert good.returncode == 0, good.stdout + good.stderr
    assert "acme-losses-loss-average" in good.stdout
    assert bad.returncode == 1
    assert "not in [0, 1)" in bad.stdout


def test_the_generated_tests_pass_as_they_come(installed):
    done = _run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")

    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_a_training_with_the_generated_feature_logs_the_average(installed):
    code = """
from mindspeed_core.activation import activate
from mindspeed_train import loop
from mindspeed_testing.model_flags import training_flags

flags = training_flags(["--acme-losses-loss-average", "0.5"], 2)
with activate(flags, host="standalone", platform="cpu") as session:
    run = loop.setup(session)
    first = session.call("train_step", run=run).losses["lm loss"]
    assert "acme-losses loss average: lm loss" in run.metrics.names(), run.metrics.names()
    assert run.metrics.local()["acme-losses loss average: lm loss"][1] == first
"""
    done = _run(installed, "-c", code)

    assert done.returncode == 0, done.stderr

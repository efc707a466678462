"""The doctor on a checkout's compiled index builder: whose it is, and the command that builds it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mindspeed_core.discovery.host import ERROR, NOTE, OK
from mindspeed_megatron import dataset_helpers
from mindspeed_megatron.dataset_helpers import wanted_name
from mindspeed_megatron.hosts.megatron_lm import checkout

OTHER = "helpers_cpp.cpython-39-x86_64-linux-gnu.so"
SUBJECT = "Megatron-LM's helpers"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A checkout on the module path, in a folder whose name needs quotes, and programs on the PATH."""
    root = tmp_path / "Megatron LM"
    datasets = root / "megatron" / "core" / "datasets"
    datasets.mkdir(parents=True)
    (datasets / "helpers.cpp").write_text("")
    (root / "megatron" / "training").mkdir()
    (root / "megatron" / "training" / "arguments.py").write_text("")
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.delenv(checkout.VARIABLE, raising=False)
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    return datasets


def program(tree, name, body):
    path = tree.parents[3] / "programs" / name
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    path.chmod(0o755)


def config_of(tree, suffix):
    program(tree, "python3-config", f"assert sys.argv[1:] == ['--extension-suffix']\nprint({suffix!r})")


def finding():
    return next(found for found in checkout.findings() if found.subject == SUBJECT)


def test_a_file_of_this_python_is_fine_whatever_else_lies_there(tree):
    config_of(tree, ".cpython-39-x86_64-linux-gnu.so")
    (tree / OTHER).write_text("")
    (tree / wanted_name()).write_text("")

    assert finding().severity == OK


def test_a_file_of_another_python_is_an_error_that_names_both(tree):
    config_of(tree, ".cpython-39-x86_64-linux-gnu.so")
    (tree / OTHER).write_text("")

    found = finding()

    assert found.severity == ERROR
    assert f"{OTHER} belongs to another Python: this one loads {wanted_name()}" in found.observed
    assert f"writes {OTHER}" in found.observed


def test_no_file_is_an_error_where_make_would_build_one_for_another_python(tree):
    config_of(tree, ".cpython-39-x86_64-linux-gnu.so")

    assert finding().severity == ERROR
    assert "not compiled" in finding().observed


def test_no_file_is_a_note_where_make_builds_the_right_one(tree):
    config_of(tree, wanted_name().removeprefix("helpers_cpp"))

    assert finding().severity == NOTE
    assert "a script compiles" in finding().observed


def test_no_file_is_an_error_without_any_python3_config(tree, monkeypatch):
    monkeypatch.setattr(dataset_helpers.shutil, "which", lambda name: None)

    assert finding().severity == ERROR
    assert "writes helpers_cpp, " in finding().observed


def test_pybind11_is_installed_first_where_it_is_missing(tree, monkeypatch):
    config_of(tree, ".other.so")
    monkeypatch.setattr(dataset_helpers, "find_spec", lambda name: None)
    assert finding().remedy.startswith(f"{sys.executable} -m pip install pybind11 && c++ ")

    monkeypatch.setattr(dataset_helpers, "find_spec", lambda name: object())
    assert finding().remedy.startswith("c++ ")


def test_the_command_compiles_for_this_python_with_its_headers(tree, monkeypatch, tmp_path):
    (tmp_path / "pybind11.py").write_text(
        "import sys\nassert sys.argv[1:] == ['--includes']\nprint('-Ia -Ib')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(dataset_helpers, "find_spec", lambda name: object())
    config_of(tree, ".other.so")
    program(tree, "c++", "open(sys.argv[-1], 'w').write(' '.join(sys.argv[1:]))")

    subprocess.run(["bash", "-c", finding().remedy], check=True)

    assert "-fPIC -Ia -Ib " in (tree / wanted_name()).read_text()
    assert finding().severity == OK

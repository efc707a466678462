"""The doctor: every mistake it knows is found, with a remedy, and a sound machine passes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from made_packages import write_metadata

from mindspeed_megatron.doctor import command as doctor_command
from mindspeed_megatron.doctor import facts as facts_of_machine
from mindspeed_megatron.doctor.checks import examine
from mindspeed_megatron.doctor.facts import Facts
from mindspeed_megatron.doctor.supported_versions import TABLE, matches, proven_pairs, same_release

SOUND = Facts(
    python="3.11.7",
    versions={
        "torch": "2.13.0+cpu",
        "megatron-core": "0.16.1",
        "pluggy": "1.6.0",
        "numpy": "2.1.0",
        "transformer-engine": "2.1",
    },
    torch={
        "torch": "2.13.0+cpu",
        "backends": {"gloo": True},
        "cuda": [],
        "npu": [],
        "megatron": "ok",
        "helpers_cpp": "ok",
    },
    environment={"OMP_NUM_THREADS": "1"},
    open_files=65536,
    shared_memory=8 << 30,
    cpus=8,
)
CUDA = {**SOUND.torch, "cuda": ["H"], "backends": {"gloo": True, "nccl": True}}


def _severe(facts, severity="error"):
    return [finding for finding in examine(facts) if finding.severity == severity]


def test_a_sound_machine_has_neither_errors_nor_warnings():
    assert _severe(SOUND) + _severe(SOUND, "warning") == []


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"python": "3.9.1"}, "python"),
        ({"versions": {**SOUND.versions, "megatron-core": "0.14.0"}}, "megatron-core"),
        ({"versions": {k: v for k, v in SOUND.versions.items() if k != "torch"}}, "torch"),
        ({"torch": {}, "probe_error": "died with signal 11"}, "torch import"),
        ({"torch": {"torch": "error: ImportError: libc10.so", "backends": {}}}, "torch import"),
        ({"torch": {**SOUND.torch, "backends": {}}}, "collective backends"),
        ({"torch": {**SOUND.torch, "megatron": "ImportError: x"}}, "megatron-core import"),
        ({"torch": {**SOUND.torch, "helpers_cpp": "ImportError: x"}}, "helpers_cpp"),
        ({"versions": {**SOUND.versions, "torch_npu": "2.7.1.post1"}}, "torch_npu"),
        ({"host": "nowhere"}, "host"),
    ],
)
def test_what_prevents_training_is_an_error_with_a_remedy(change, subject):
    findings = _severe(replace(SOUND, **change))

    assert [finding.subject for finding in findings] == [subject]
    assert findings[0].remedy


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"open_files": 1024}, "open files"),
        ({"shared_memory": 64 << 20}, "shared memory"),
        ({"environment": {"OMP_NUM_THREADS": "many"}}, "OMP_NUM_THREADS"),
        ({"torch": {**CUDA, "backends": {"gloo": True}}}, "NCCL"),
        ({"torch": CUDA, "versions": {**SOUND.versions, "torch_npu": "2.13.0"}}, "torch_npu"),
        ({"versions": {**SOUND.versions, "mindspeed": "2.0"}}, "mindspeed"),
        ({"broken": (("pack 1.0", "ImportError: x", "pip install --upgrade pack"),)}, "plugin pack 1.0"),
    ],
)
def test_what_makes_training_fragile_is_a_warning_with_a_remedy(change, subject):
    findings = _severe(replace(SOUND, **change), "warning")

    assert [finding.subject for finding in findings] == [subject]
    assert findings[0].remedy


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"environment": {}}, "OMP_NUM_THREADS"),
        ({"torch": CUDA}, "CUDA_DEVICE_MAX_CONNECTIONS"),
        (
            {"versions": {k: v for k, v in SOUND.versions.items() if k != "transformer-engine"}},
            "transformer-engine",
        ),
    ],
)
def test_what_is_good_to_know_is_a_note(change, subject):
    assert subject in [finding.subject for finding in _severe(replace(SOUND, **change), "note")]


def test_a_torch_npu_that_cannot_find_cann_is_an_error():
    versions = {**SOUND.versions, "torch_npu": "2.13.0"}
    outcome = "ImportError: libhccl.so: cannot open shared object file"
    findings = _severe(replace(SOUND, versions=versions, torch={**SOUND.torch, "torch_npu": outcome}))

    assert [finding.subject for finding in findings] == ["torch_npu"]
    assert "set_env.sh" in findings[0].remedy


@pytest.mark.parametrize(
    ("version", "versions", "verdict"),
    [
        ("0.15.3", ">=0.15.3,<0.17", True),
        ("0.16.1+local", ">=0.15.3,<0.17", True),
        ("0.17.0", ">=0.15.3,<0.17", False),
        ("0.16.0rc0", ">=0.15.3,<0.17", True),
        ("not a version", ">=1", False),
    ],
)
def test_versions_are_compared_without_their_local_part(version, versions, verdict):
    assert matches(version, versions) is verdict


@pytest.mark.parametrize(
    ("python", "core", "proven"),
    [
        ("3.11.7", "0.16.1", True),
        ("3.11.7", "0.16.1+local", True),
        ("3.12.1", "0.18.2", False),
        ("3.10.2", "0.16.1", False),
    ],
)
def test_a_pair_of_python_and_megatron_core_is_proven_or_expected_to_work(python, core, proven):
    versions = {**SOUND.versions, "megatron-core": core}
    findings = _severe(replace(SOUND, python=python, versions=versions), "ok")
    (found,) = [finding.observed for finding in findings if finding.subject == "megatron-core"]

    assert found.startswith(core)
    assert (found == core) is proven
    assert (f"expected to work on Python {python}; the test suite was run with" in found) is not proven


def test_versions_that_are_tested_are_those_of_the_pairs():
    (row,) = [row for row in TABLE if row.distribution == "megatron-core"]
    assert set(row.tested) == {core for _, core in proven_pairs()}


def test_a_post_release_of_torch_npu_fits_the_same_torch():
    assert same_release("2.7.1+cpu", "2.7.1.post2")
    assert not same_release("2.7.1", "2.8.0")


def test_the_dependencies_of_the_package_agree_with_the_table():
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    required = [*(requires("mindspeed-core") or ()), *(requires("mindspeed-train") or ())]
    declared = {r.name: r.specifier for r in map(Requirement, required)}
    for row in TABLE:
        if row.required:
            assert str(declared[row.distribution]) == str(Requirement(f"x{row.versions}").specifier)


def test_doctor_passes_on_this_machine_and_reports_every_check(features, monkeypatch):
    monkeypatch.setattr(facts_of_machine, "_probe_torch", lambda: (dict(SOUND.torch), ""))
    result = features("doctor", "--json")
    found = json.loads(result.output)

    assert result.exit_code == 0, result.output
    assert found["ok"] is True
    assert {"python", "torch", "megatron-core", "helpers_cpp"} <= {f["subject"] for f in found["findings"]}


def test_doctor_fails_and_prints_the_remedy_when_torch_cannot_be_imported(features, monkeypatch):
    monkeypatch.setattr(facts_of_machine, "_probe_torch", lambda: ({}, "the process ended with status -11"))
    result = features("doctor")

    assert result.exit_code == 1
    assert "status -11" in result.output
    assert "->" in result.output


def test_a_platform_that_cannot_be_loaded_is_among_the_findings(features, tmp_path, on_path, monkeypatch):
    write_metadata(tmp_path, "odd-device", {"mindspeed.platforms odd": "a_module_that_nobody_has:Odd"})
    on_path(tmp_path)
    monkeypatch.setattr(facts_of_machine, "_probe_torch", lambda: (dict(SOUND.torch), ""))

    findings = json.loads(features("doctor", "--json").output)["findings"]

    found = [f for f in findings if f["subject"].startswith("plugin odd-device")]
    assert len(found) == 1
    assert "a_module_that_nobody_has" in found[0]["found"]
    assert "platform cpu" in [f["subject"] for f in findings]


def test_a_probe_that_dies_is_reported_with_its_last_words(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text(
        "import sys\nprint('cannot map memory', file=sys.stderr)\nimport os\nos._exit(9)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    answer, problem = facts_of_machine._probe_torch()

    assert answer == {}
    assert "status 9" in problem
    assert "cannot map memory" in problem


def test_the_verdict_comes_first_then_the_worst_then_what_is_fine_in_short(features, monkeypatch):
    facts = replace(SOUND, open_files=1024, helpers_build="")
    monkeypatch.setattr(facts_of_machine, "collect", lambda *asked: facts)

    lines = features("doctor").output.splitlines()
    everything = features("doctor", "--all").output

    assert lines[0] == "ready to train  1 warning, 2 notes"
    assert lines.index("warning") < lines.index("note") < lines.index("ok")
    assert "  open files  ulimit -n is 1024; data loaders and checkpoints open more" in lines
    assert any("python 3.11.7" in line for line in lines)
    assert "  helpers_cpp          megatron-core's compiled index builder loads" in everything


def test_doctor_says_on_a_terminal_what_takes_its_time_and_leaves_no_trace(features, monkeypatch):
    monkeypatch.setattr(facts_of_machine, "_probe_torch", lambda: (dict(SOUND.torch), ""))
    monkeypatch.setattr(doctor_command, "columns", lambda stream: 80)
    result = features("doctor", "--json")

    parts = result.stderr.split("\r\x1b[K")
    assert "importing torch and megatron-core in another process ..." in parts
    assert parts[-1] == ""
    assert json.loads(result.stdout)["ok"] is True

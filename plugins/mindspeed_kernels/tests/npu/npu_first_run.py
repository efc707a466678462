"""The first run on an NPU, tried on the value device."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from mindspeed_kernels import device_measurements, first_run
from mindspeed_kernels.device_measurements import problems
from mindspeed_kernels.measured_calls import BETWEEN_RANKS, CALLS, Sizes
from mindspeed_kernels.ops import OPERATORS
from mindspeed_kernels.ops.operator import REFERENCE
from mindspeed_testing.npu.value_training import plain_fork_server, value_session

WITHOUT_KERNEL = {"mx_grouped_matmul"}
"""Operators whose kernel a 910B does not have."""


def test_every_risk_is_checked_in_order_and_the_file_says_what_was_found(tmp_path, capsys):
    out = tmp_path / "first.json"
    with value_session():
        status = first_run.main(["--out", str(out), "--no-scenarios", "--no-measurements"])
    report = json.loads(out.read_text())
    assert [check["check"] for check in report["checks"]] == list(first_run.RISKS)
    assert [check for check in report["checks"] if not check["passed"]] == []
    assert status == 0
    assert report["machine"]["device"] == "Ascend910B1"
    assert "send" in capsys.readouterr().out


def test_a_check_that_fails_is_in_the_file_and_the_others_still_run(tmp_path, monkeypatch):
    def fails(device):
        raise AssertionError("not zero")

    monkeypatch.setattr(first_run, "RISKS", {"broken": fails, "fine": lambda device: "good"})
    with value_session():
        results = list(first_run.risks())
    assert [(check["check"], check["passed"]) for check in results] == [("broken", False), ("fine", True)]
    assert "not zero" in results[0]["found"]


@pytest.mark.parametrize("available", [False])
def test_without_a_device_one_sentence_says_so(available, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.npu, "is_available", lambda: available)
    assert first_run.main(["--out", str(tmp_path / "first.json")]) == 2
    assert capsys.readouterr().err.strip() == first_run.NO_DEVICE


def test_proofs_of_features_run_as_a_command_and_their_report_is_in_the_file(tmp_path, monkeypatch):
    out = tmp_path / "first.json"
    # A process that the command starts has no value device: it proves on the CPU here.
    on_cpu = partial(first_run.scenarios, platform="cpu")
    monkeypatch.setattr(first_run, "scenarios", on_cpu)
    monkeypatch.setattr(first_run, "RISKS", {})
    with value_session(), plain_fork_server():
        status = first_run.main(["--out", str(out), "--no-measurements", "--features", "ops-backend"])
    report = json.loads(out.read_text())["scenarios"]
    assert (status, report["ok"]) == (0, True), report


def test_proofs_that_cannot_run_say_why_in_the_file_and_end_with_status_1(tmp_path, monkeypatch):
    out = tmp_path / "first.json"
    monkeypatch.setattr(first_run, "RISKS", {})
    with value_session():
        status = first_run.main(["--out", str(out), "--no-measurements", "--features", "no-such-feature"])
    report = json.loads(out.read_text())["scenarios"]
    assert status == 1
    assert "no-such-feature" in report["error"]


def test_proofs_are_asked_of_the_device_itself():
    # The command starts a process of its own, which finds no device beside the stand-in libraries.
    report = first_run.scenarios(["deterministic"])
    assert report["ok"] is False
    assert "--platform 'npu'" in report["error"]
    assert "/dev/davinci0" in report["error"]


def test_kernels_are_measured_beside_their_references(tmp_path, monkeypatch):
    monkeypatch.setattr(device_measurements, "RUNS", 1)
    # Contracts are checked at the first call of a kind, which is another test's.
    for name in CALLS:
        monkeypatch.setattr(OPERATORS[name], "_chosen", {})
    # The stand-in runtime waits for nothing.
    monkeypatch.setattr(device_measurements, "_wait", lambda device: None)
    with value_session():
        results = list(device_measurements._kernels(CALLS, Sizes("npu", small=True)))
    assert problems(results) == []
    assert [result for result in results if "error" in result] == []
    assert all(result["reference_seconds"] > 0 for result in results)
    served = {result["of"]: result["backend"] for result in results}
    assert {name for name in CALLS if served[name] == REFERENCE} == WITHOUT_KERNEL


def test_every_operator_with_a_kernel_is_measured():
    with_kernel = {
        name
        for name, operator in OPERATORS.items()
        if any(
            "npu" in backend.devices and "cpu" not in backend.devices
            for backend in operator.backends.values()
        )
    }
    assert sorted(with_kernel - {*CALLS, *BETWEEN_RANKS}) == []
    assert sorted({*CALLS, *BETWEEN_RANKS} - set(OPERATORS)) == []

"""The first run on an NPU, tried on the value device."""

from __future__ import annotations

import json

import pytest
import torch

from mindspeed_kernels import first_run
from mindspeed_testing.npu.value_training import value_session


def test_every_risk_is_checked_in_order_and_the_file_says_what_was_found(tmp_path, capsys):
    out = tmp_path / "first.json"
    with value_session():
        status = first_run.main(["--out", str(out), "--no-scenarios"])
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

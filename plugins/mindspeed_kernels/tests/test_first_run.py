"""The file of a first run, made on the CPU in small sizes: measurements in a format that holds."""

from __future__ import annotations

import json

import pytest

from mindspeed_kernels import device_measurements, first_run
from mindspeed_kernels.device_measurements import problems

SOUND = {"measure": "matmul", "of": "float32", "value": 1.5, "unit": "TFLOP/s", "seconds": 0.1}


def test_the_smoke_run_writes_a_sound_file_with_every_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(device_measurements, "RUNS", 1)
    out = tmp_path / "smoke.json"

    status = first_run.main(["--smoke", "--out", str(out)])

    report = json.loads(out.read_text())
    results = report["measurements"]
    assert [result for result in results if "error" in result] == []
    assert status == 0
    assert report["format"] == first_run.FORMAT
    assert problems(results) == []
    named = {result["measure"] for result in results}
    assert named == {"matmul", "host copy", "all-reduce", "all-to-all", "kernel", "training step"}
    [step] = [result for result in results if result["measure"] == "training step"]
    assert [tmp_path / name for name in step["timeline"] if not (tmp_path / name).is_file()] == []
    assert step["timeline"]


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ({}, "a list"),
        ([{**SOUND, "unit": "furlongs"}], "unit"),
        ([{**SOUND, "value": "fast"}], "numbers"),
        ([{**SOUND, "seconds": -1}], "numbers"),
        ([{"of": "float32", "error": "x"}], "no measure"),
        ([{"measure": "matmul", "of": "float32", "error": None}], "no text"),
    ],
)
def test_a_file_that_is_not_made_so_is_named(results, words):
    assert any(words in problem for problem in problems(results))


def test_a_measurement_that_fails_says_so_and_the_others_go_on(tmp_path, monkeypatch):
    def fails(run, device):
        raise RuntimeError("no memory")

    monkeypatch.setattr(device_measurements, "_seconds", fails)
    monkeypatch.setattr(device_measurements, "_training", lambda *given: SOUND)
    results = list(device_measurements.measurements("cpu", tmp_path, small=True))

    assert problems(results) == []
    assert {result.get("error") for result in results} == {"RuntimeError: no memory", None}

"""The example of a long sequence under a memory limit, on a short sequence."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "long_context" / "demo.py"


def demo(folder, *flags):
    command = [sys.executable, str(EXAMPLE), "--out", str(folder), "--steps", "1", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    return done, json.loads((folder / "memory.json").read_text()) if not done.returncode else []


@pytest.mark.thorough
def test_a_sequence_trains_alike_on_one_and_two_processes_under_a_limit(tmp_path):
    done, results = demo(tmp_path, "--seq-length", "256", "--cap-mib", "8192", "--ranks", "1", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    alone, together = results
    assert alone["trained"]
    assert together["trained"]
    assert abs(alone["losses"][0] - together["losses"][0]) < 1e-5
    picture = (tmp_path / "memory.svg").read_text()
    assert "1 process<" in picture
    assert "2 processes<" in picture


def test_the_operating_system_holds_the_limit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    train = runpy.run_path(str(EXAMPLE))["train"]
    flags = ["--seq-length", "256", "--train-iters", "1"]
    result = train(1, 160 << 20, flags, tmp_path, most_seconds=120.0)
    assert not result.trained
    assert result.reason

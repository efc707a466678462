"""The example of 8-bit moments: killed, resumed with the same losses, profiled and analysed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "eight_bit_moments" / "demo.py"


@pytest.mark.thorough
def test_a_killed_job_repeats_what_was_lost_and_two_of_its_steps_are_analysed(tmp_path):
    program = [sys.executable, str(EXAMPLE), "--out", str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=500)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "losses equal" in said
    assert "rank 0 (cpu), 2 steps of" in said
    assert "rank 1 (cpu), 2 steps of" in said
    assert "waiting " in said
    record = json.loads((tmp_path / "resumed" / "metrics.jsonl").read_text().splitlines()[0])
    assert record
    assert len(list((tmp_path / "profile").iterdir())) == 2

"""Bytes that routed experts keep for backward at the shape of DeepSeek-V3, without computing anything."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from moe_kept import LEVELS, MIB, ROWS, kept_bytes


@pytest.mark.parametrize(("level", "mib"), LEVELS.items())
def test_levels_keep_what_the_formulas_say(level, mib):
    probabilities = 0 if level == "level1" else 4 * ROWS
    assert kept_bytes(level) == mib * MIB + probabilities

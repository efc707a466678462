"""``kill -9`` at any moment of conversion and export: going on gives the same bytes, no half is a whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_weights_round_trip import call

from mindspeed_testing.small_llama import write_small_llama

HERE = Path(__file__).parent


def killed(kind, source, folder, every, first=1):
    folder.mkdir()
    given = [kind, str(source), str(folder), str(every), str(first)]
    command = [sys.executable, str(HERE / "killed_work.py"), *given]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_small_llama(tmp_path_factory.mktemp("killed") / "hf")


@pytest.fixture(scope="module")
def converted(model):
    call("convert", "--input-model-dir", model, "--output-model-dir", model.parent / "mc")
    return model.parent / "mc"


def test_a_conversion_that_is_killed_goes_on(model, tmp_path):
    found = killed("convert", model, tmp_path / "work", 29)
    assert found["wrong"] == []
    assert found["moments"] > 100
    assert found["reused"] > 0


PARTS = 4
EVERY = [*((kind, part) for kind in ("convert", "export") for part in range(1, PARTS + 1)), ("older", 1)]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "first"), EVERY)
def test_work_that_is_killed_at_any_moment_goes_on(model, converted, tmp_path, kind, first):
    source = converted if kind == "export" else model
    found = killed(kind, source, tmp_path / "work", 1 if kind == "older" else PARTS, first)
    assert found["wrong"] == []
    assert found["moments"] > {"convert": 100, "export": 30, "older": 10}[kind]

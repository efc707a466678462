"""The command on the page's own example: what fails a run although every test passed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_testing.npu.stubs import DEVICES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "npu-conformance.md"
SOURCE, TEST = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[:2]
FURTHER = """

def test_norm():
    from acme import norm

    run_call(Call("norm", norm, lambda npu: (npu.tensor(4, 8, requires_grad=True), npu.tensor(8))))
"""


@pytest.fixture
def command(tmp_path):
    """Runs the command on the example, in a process that knows nothing of this one's stand-ins."""
    package = tmp_path / "acme"
    package.mkdir()
    (package / "__init__.py").write_text(SOURCE)
    tests = tmp_path / "tests"
    tests.mkdir()

    def run(test, *options):
        (tests / "npu_acme.py").write_text(test)
        left_out = ("LD_LIBRARY_PATH", DEVICES)
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))
        )
        return subprocess.run(
            [sys.executable, "-m", "mindspeed_testing.npu", "--source", "acme", str(tests), *options],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    return run


def test_a_call_that_no_test_ran_fails_the_run_and_so_does_a_changed_schema(command, tmp_path):
    record = tmp_path / "schemas.json"
    done = command(TEST, "--write-schemas", str(record))
    assert done.returncode == 1
    assert "1 passed" in done.stdout
    assert "uses of torch_npu: 1 of 2 calls run" in done.stdout
    assert "__init__.py:15: torch_npu.npu_rms_norm was never run by a test" in done.stdout

    record.write_text(record.read_text().replace("float epsilon=", "float eps="))
    done = command(TEST + FURTHER, "--schemas", str(record))
    assert done.returncode == 1
    assert "uses of torch_npu: 2 of 2 calls run" in done.stdout
    assert "never run" not in done.stdout
    assert "torch_npu.npu_rms_norm changed (torch_npu 2.13.0 -> 2.13.0):" in done.stdout

"""The example from a training command to the report, and what the page about it shows."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindspeed_core.flags.flag_set import known_flags
from mindspeed_core.registry import Registry
from mindspeed_tune.command import program
from mindspeed_tune.contributions import check_callable
from mindspeed_tune.hardware import read_hardware
from mindspeed_tune.space_file import read_space, tomllib

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "find_a_layout"
SMALL = ("--num-layers", "2", "--hidden-size", "64", "--seq-length", "64")
PAGE = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_the_example_ends_with_measured_layouts(tmp_path):
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": programs, "OUT": str(tmp_path), "TRIALS": "2", "MEASURED": "2"}
    never = tmp_path / "never"
    ended = subprocess.run(
        ["sh", str(EXAMPLE / "find.sh"), *SMALL, "--save", str(never)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "note: --save: ignored" in ended.stdout
    assert not never.exists()
    report = json.loads((tmp_path / "search.json").read_text())
    assert any(note.startswith("--save: ignored") for note in report["notes"])
    assert report["top"][0]["measured"] > 0
    assert report["prediction"]["compared"] == 2
    machine = read_hardware(str(tmp_path / "machine.toml"))
    # In so small a model operators are launched rather than computed: that number its runs tell.
    assert "data parallel" in machine.sources["device.launch"]
    assert {path.name for path in tmp_path.iterdir()} >= {
        "search.html",
        "search.md",
        "journal",
        "calibration",
    }


def test_the_examples_space_names_flags_that_there_are():
    space = read_space(EXAMPLE / "space.toml", known_flags(Registry.discover()))
    assert space.flags["--micro-batch-size"] == (1, 4)


def test_options_that_the_page_names_exist():
    shown = {
        name: {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, command in program.commands.items()
    }
    known = set().union(*shown.values()) | set(known_flags(Registry.discover())._by_option)
    named = set(re.findall(r"--(?:tune|plan|auto|layers)[a-z-]*", PAGE))
    assert named - known == set()
    for command in re.findall(r"mindspeed-tune (search|calibrate|measure|report)", PAGE):
        assert CliRunner().invoke(program, [command, "--help"]).exit_code == 0


def test_the_pages_space_file_can_be_read(tmp_path):
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert "limits" in tomllib.loads(text)
    path = tmp_path / "space.toml"
    path.write_text(text)
    assert read_space(path, known_flags(Registry.discover())).limits["context_tokens"] == 8192


def test_the_pages_strategy_and_cost_are_functions_of_the_right_kind():
    [text] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found = {}
    exec(compile(text, "tuning.md", "exec"), found)
    for name in ("smallest_first", "slow_first_stage"):
        check_callable(found[name])

"""The public hook interface changes only deliberately, and an older plugin's view of it stays true."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mindspeed_core.hooks.versions import API_VERSION, parsed

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = sorted((ROOT / "tests" / "contract" / "hook_api").glob("*.json"), key=lambda p: parsed(p.stem))


@pytest.fixture(scope="module")
def present():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from hook_api import interface
    finally:
        sys.path.pop(0)
    return json.loads(json.dumps(interface()))


def earlier():
    """Every earlier version of the interface that this one must still serve."""
    return [path for path in WRITTEN if parsed(path.stem)[0] == parsed(API_VERSION)[0]]


def test_the_interface_is_the_one_that_was_written_down(present):
    path = ROOT / "tests" / "contract" / "hook_api" / f"{API_VERSION}.json"
    assert present == json.loads(path.read_text()), (
        "the hook interface changed. If plugins can tell the difference, raise API_VERSION in "
        "mindspeed_core/hooks/versions.py (minor for what is added, major for what goes), then run "
        "python tools/hook_api.py and describe the change in docs/hook-versions.md"
    )


@pytest.mark.parametrize("path", earlier(), ids=lambda path: path.stem)
def test_every_stage_and_argument_of_an_earlier_minor_version_still_works(present, path):
    lost = []
    for name, then in json.loads(path.read_text())["stages"].items():
        now = present["stages"].get(name)
        if now is None:
            lost.append(name)
            continue
        lost += [f"{name}({argument})" for argument in then["arguments"] if argument not in now["arguments"]]
        if now["collects"] != then["collects"]:
            lost.append(f"{name}: how results are combined")
    assert lost == []


@pytest.mark.parametrize("path", earlier(), ids=lambda path: path.stem)
def test_what_came_later_says_so(present, path):
    then, version = json.loads(path.read_text()), parsed(path.stem)
    unsaid = []
    for name, stage in present["stages"].items():
        if name not in then["stages"]:
            unsaid += [name] if parsed(stage["since"]) <= version else []
            continue
        before = then["stages"][name]["arguments"]
        for argument, since in stage["arguments"].items():
            if argument not in before and parsed(since) <= version:
                unsaid.append(f"{name}({argument})")
    assert unsaid == []


@pytest.mark.parametrize("path", earlier(), ids=lambda path: path.stem)
def test_nothing_that_declarations_and_platforms_use_is_gone(present, path):
    then = json.loads(path.read_text())
    lost = set(then["feature"]) - set(present["feature"]) | set(then["platform"]) - set(present["platform"])
    for name, fields in then["declarations"].items():
        lost |= {f"{name}.{field}" for field in fields if field not in present["declarations"].get(name, ())}
    assert lost == set()

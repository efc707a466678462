"""Uses of torch_npu are found in sources, and a use that no test ran is noticed."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path

import pytest

from mindspeed_core.errors import UserError
from mindspeed_megatron.devices.torch_npu_uses import api_uses, package_folders, uses_of
from mindspeed_testing.npu import schemas
from mindspeed_testing.npu.reached import ReachedUses

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "npu_conformance" / "schemas.json"


def names(text):
    return [site.name for site in uses_of(text, Path("a.py"))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch_npu\ntorch_npu.npu_swiglu(x)", ["torch_npu.npu_swiglu"]),
        ("import torch_npu as t\nt.npu_swiglu(x)", ["torch_npu.npu_swiglu"]),
        ("def f():\n    from torch_npu import npu_swiglu as s\n    s(x)", ["torch_npu.npu_swiglu"]),
        ("from torch_npu import profiler as p\np.profile()", ["torch_npu.profiler.profile"]),
        ("import torch\ntorch.ops.npu.npu_swiglu.default(x)", ["torch.ops.npu.npu_swiglu.default"]),
        ("import torch\nops = torch.ops.npu\nops.npu_swiglu(x)", ["torch.ops.npu.npu_swiglu"]),
        ("import torch\ntorch.npu.synchronize()", ["torch.npu.synchronize"]),
        ("import torch_npu\ngetattr(torch_npu, 'npu_swiglu')(x)", ["torch_npu.npu_swiglu"]),
        ("class P:\n    def f(self):\n        self.runtime().synchronize()", ["torch.npu.synchronize"]),
        ("import torch_npu\nhand_on(torch_npu.npu_swiglu)", ["torch_npu.npu_swiglu"]),
        ("import torch_npu\nprint(torch_npu)", []),
        ("import torch\ntorch.cuda.synchronize()  # not torch.npu", []),
    ],
)
def test_uses_are_found_in_every_way_of_writing_them(text, expected):
    assert names(text) == expected


def test_calls_mentions_and_excuses_are_told_apart():
    call, excused, mention = uses_of(
        "import torch_npu\n"
        "torch_npu.npu_a(\n    1,\n)\n"
        "torch_npu.npu_b()  # needs an NPU: reads a counter\n"
        "kind = torch_npu.npu_c",
        Path("a.py"),
    )
    assert (call.is_call, call.line, call.last_line, call.excuse) == (True, 2, 4, "")
    assert (excused.is_call, excused.excuse) == (True, "reads a counter")
    assert not mention.is_call


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(UserError, match="--source no_such_package"):
        package_folders(["no_such_package"])


DEVICE = """\
def npu_a(x):
    return x


npu_b = npu_a


def npu_refused():
    raise RuntimeError("error code is 507899")


def npu_fails():
    raise TypeError("unexpected keyword")
"""
SOURCE = """\
import torch_npu


def straight():
    return torch_npu.npu_a(
        None,
    )


def never():
    return torch_npu.npu_b(None)


class Kept:
    @property
    def refused(self):
        return torch_npu.npu_refused()


def fails():
    return torch_npu.npu_fails()
"""


@pytest.mark.parametrize("loaded", [False, True])
def test_a_call_counts_when_it_returned_or_was_refused_by_the_runtime(tmp_path, monkeypatch, loaded):
    device = types.ModuleType("torch_npu")
    exec(DEVICE, vars(device))
    monkeypatch.setitem(sys.modules, "torch_npu", device)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"uses_of_torch_npu_{loaded}"
    path = tmp_path / f"{name}.py"
    path.write_text(SOURCE)
    if loaded:
        importlib.import_module(name)
    reached = ReachedUses(uses_of(SOURCE, path))
    reached.start()
    try:
        module = importlib.import_module(name)
        module.straight()
        for function in (lambda: module.Kept().refused, module.fails):
            with pytest.raises((RuntimeError, TypeError)):
                function()
    finally:
        reached.stop()
        del sys.modules[name]
    assert sorted(site.name for site in reached.reached) == ["torch_npu.npu_a", "torch_npu.npu_refused"]
    assert sorted(site.name for site in reached.missed()) == ["torch_npu.npu_b", "torch_npu.npu_fails"]


def test_recorded_schemas_name_their_version_and_know_every_name():
    recorded = schemas.read_snapshot(RECORD)
    assert recorded["torch_npu"].count(".") >= 2
    assert recorded["names"]
    assert [name for name, lines in recorded["names"].items() if not lines] == []


def test_a_record_that_is_none_says_how_to_write_one(tmp_path):
    path = tmp_path / "schemas.json"
    path.write_text(json.dumps({"names": []}))
    with pytest.raises(UserError, match="--write-schemas"):
        schemas.read_snapshot(path)


def test_what_changed_is_shown_with_both_versions(monkeypatch):
    now = {"torch_npu.npu_a": ["npu::npu_a(Tensor x)"], "torch_npu.npu_new": ["npu::npu_new()"]}
    monkeypatch.setattr(schemas, "installed_version", lambda: "2.14.0")
    monkeypatch.setattr(schemas, "describe", lambda name: now[name])
    before = {"torch_npu.npu_a": ["npu::npu_a(Tensor y)"], "torch_npu.npu_old": ["npu::npu_old()"]}
    assert schemas.compare_snapshot({"torch_npu": "2.13.0", "names": before}, now) == [
        "torch_npu.npu_new: used, but not recorded",
        "torch_npu.npu_old: recorded, but no longer used",
        "torch_npu.npu_a changed (torch_npu 2.13.0 -> 2.14.0):",
        "  - npu::npu_a(Tensor y)",
        "  + npu::npu_a(Tensor x)",
    ]


def test_sources_of_the_core_are_read_without_importing_them():
    sites = api_uses([ROOT / "mindspeed_core" / "platforms", *ROOT.glob("packages/*/src/*/devices")])
    assert {"torch.npu.synchronize", "torch.npu.is_available"} <= {site.name for site in sites}

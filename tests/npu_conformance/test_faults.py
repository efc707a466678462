"""Faults drawn from sources: each rule changes what it says, and nothing that cannot matter."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from mindspeed_testing.npu.faults import drawn, faults_of, named

ROOT = Path(__file__).parents[2]

SOURCE = '''
import torch
import torch_npu


def kernel(x, weight, counts, stream):
    """Compute in torch.float32, of len(x) rows."""
    stream.wait_event(counts)
    rows = torch.zeros(x.shape[0], dtype=torch.int32)
    return torch_npu.npu_thing(x.transpose(0, 1), weight, len(rows), layout="SBH", scale=1.0, turns=2)


def elsewhere(x, store):
    store.wait(["key"], 3)
    return x.to(torch.float32)
'''
DEFAULTS = {"torch_npu.npu_thing": {"layout": "BSH", "scale": 1.0, "turns": 0}}
PATH = Path("kernel.py")


@pytest.fixture(scope="module")
def faults():
    return faults_of(SOURCE, PATH, DEFAULTS)


def of(faults, rule):
    return [fault for fault in faults if fault.rule == rule]


def test_a_keyword_goes_unless_it_says_its_default(faults):
    assert [fault.change for fault in of(faults, "dropped keyword")] == [
        "torch_npu.npu_thing without layout='SBH'",
        "torch_npu.npu_thing without turns=2",
    ]


def test_neighbours_change_places(faults):
    assert (
        "torch_npu.npu_thing(weight, x.transpose(0, 1), len(rows)" in of(faults, "swapped arguments")[0].text
    )


def test_dtypes_layouts_and_lengths_of_functions_that_use_the_device_change(faults):
    assert [fault.change for fault in of(faults, "dtype")] == ["torch.int32 is torch.int64"]
    assert {fault.change for fault in of(faults, "layout")} == {"SBH is BSH", "without x.transpose(0, 1)"}
    assert {fault.change for fault in of(faults, "length")} == {"x.shape[0] + 1", "len(rows) + 1"}
    assert "torch.zeros(x.shape[0] + 1, dtype" in of(faults, "length")[0].text


def test_a_wait_of_a_stream_goes_and_one_of_a_store_stays(faults):
    [fault] = of(faults, "missing wait")
    assert fault.line == 8
    assert "wait_event" not in fault.text
    assert "store.wait" in fault.text


def test_every_fault_is_one_change_of_a_source_that_still_compiles(faults):
    assert len({fault.text for fault in faults}) == len(faults)
    for fault in faults:
        compile(fault.text, "kernel.py", "exec")


def test_a_draw_takes_from_every_rule_in_turn_and_comes_again(faults):
    chosen = drawn(faults, 6, seed=3)
    assert {fault.rule for fault in chosen} == {fault.rule for fault in faults}
    assert drawn(faults, 6, seed=3) == chosen
    assert len(drawn(faults, 1000)) == len(faults)


def test_a_named_fault_has_to_be_there_once(tmp_path):
    source = tmp_path / "kernel.py"
    source.write_text(SOURCE)
    assert named(source, "turns=2", "turns=3").line == 10
    with pytest.raises(ValueError, match="occurs 0 times"):
        named(source, "nowhere", "")


def constants(tree):
    """Return the strings of a module by the names that it binds them to."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            pairs = zip(names, values)
            found |= {name.id: value.value for name, value in pairs if isinstance(value, ast.Constant)}
    return found


def planted_faults():
    """Yield module and old text of every fault that tests plant, by file."""
    for path in sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py")]):
        text = path.read_text(encoding="utf-8")
        if "PlantedFault(" not in text:
            continue
        tree = ast.parse(text)
        known = constants(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "PlantedFault":
                module, old = (
                    known.get(getattr(one, "id", ""), getattr(one, "value", "")) for one in node.args[:2]
                )
                if isinstance(old, str) and isinstance(module, str) and module.startswith("mindspeed"):
                    yield path.name, module, old


def test_what_tests_plant_faults_into_is_still_there_once():
    # Tests on stand-ins for NPUs run elsewhere, where nobody sees at once that they plant nothing.
    faults = list(planted_faults())
    assert {"npu_launches.py", "test_planted_orders.py"} <= {name for name, _, _ in faults}
    sources = {module: Path(find_spec(module).origin).read_text("utf-8") for _, module, _ in faults}
    assert [fault for fault in faults if sources[fault[1]].count(fault[2]) != 1] == []


def test_faults_of_the_mutation_run_are_still_there(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    assert len(import_module("npu_mutations").named_faults()) == 6

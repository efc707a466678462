"""Faults drawn from sources: each rule changes what it says, and nothing that cannot matter."""

from pathlib import Path

import pytest

from mindspeed_testing.npu.faults import drawn, faults_of, named

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
    assert [fault.what for fault in of(faults, "dropped keyword")] == [
        "torch_npu.npu_thing without layout='SBH'",
        "torch_npu.npu_thing without turns=2",
    ]


def test_neighbours_change_places(faults):
    assert (
        "torch_npu.npu_thing(weight, x.transpose(0, 1), len(rows)" in of(faults, "swapped arguments")[0].text
    )


def test_dtypes_layouts_and_lengths_of_functions_that_use_the_device_change(faults):
    assert [fault.what for fault in of(faults, "dtype")] == ["torch.int32 is torch.int64"]
    assert {fault.what for fault in of(faults, "layout")} == {"SBH is BSH", "without x.transpose(0, 1)"}
    assert {fault.what for fault in of(faults, "length")} == {"x.shape[0] + 1", "len(rows) + 1"}
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

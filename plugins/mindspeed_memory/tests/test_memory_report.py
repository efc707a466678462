"""The report of a step's memory: what was measured is what formulas say, and files are whole."""

import json
import pickle
from xml.etree import ElementTree

import pytest
from optimizer_runs import opened, train

from mindspeed_memory.report.table import removed_by
from mindspeed_memory.report.timeline import Timeline, picture, readable
from mindspeed_testing.worlds import run_world

BF16 = ("--bf16", "--clip-grad", "0.5")
LAYOUTS = {
    "float32": ((), {"parameters": "4 N", "gradients": "4 N", "optimizer": "8 N"}),
    "bfloat16": (BF16, {"parameters": "2 N", "gradients": "4 N", "optimizer": "12 N"}),
    "split": ((*BF16, "--reuse-fp32-param"), {"optimizer": "10 N"}),
    "swapped": ((*BF16, "--swap-optimizer"), {"optimizer": "0 N"}),
}


THOROUGH = ("float32", "split")


def reported(folder, names):
    return {name: report_in(f"{folder}/{name}", LAYOUTS[name][0]) for name in names}


def report_in(folder, flags):
    with opened(*flags, "--memory-report", "--memory-report-path", folder) as run:
        train(run, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, asked_for):
    root = tmp_path_factory.mktemp("reports")
    run_world(reported, 1, str(root), sorted({"bfloat16", *asked_for("name")}), timeout=390)
    return root


def report(folder, name):
    return json.loads((folder / name / "rank-0.json").read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in LAYOUTS]
)
def test_kept_bytes_are_those_of_the_formulas(folder, name):
    rows = {
        row["kind"].split()[-1] if "optimizer" not in row["kind"] else "optimizer": row
        for row in report(folder, name)["kept"]
    }
    for kind, formula in LAYOUTS[name][1].items():
        assert rows[kind]["formula"] == formula
        # Ties that were rounded up take a few bytes, on the host and in lists.
        assert rows[kind]["bytes"] == pytest.approx(rows[kind]["by_formula"], rel=2e-3, abs=200)


def test_kinds_add_up_to_the_peak_and_tensors_are_named(folder):
    for phase in report(folder, "bfloat16")["phases"]:
        assert sum(phase["kinds"].values()) == phase["peak_bytes"]
        assert len(phase["largest"]) == 3
        assert all(one["removed_by"] for one in phase["largest"])


def test_picture_and_file_of_the_visualiser_can_be_read(folder):
    root = ElementTree.parse(folder / "bfloat16" / "rank-0.svg").getroot()
    text = " ".join(root.itertext())
    assert all(word in text for word in ("forward and backward", "update", "optimizer state"))
    with (folder / "bfloat16" / "rank-0.pickle").open("rb") as file:
        (events,) = pickle.load(file)["device_traces"]
    assert {event["action"] for event in events} == {"alloc", "free_completed"}


@pytest.mark.parametrize(
    ("kind", "module", "flag"),
    [
        ("activations", "decoder.layers.0.mlp", "--recompute-activation-function"),
        ("activations", "chunk 1 decoder.layers.3.self_attention.linear_qkv", "--swap-attention"),
        ("activations", "decoder.layers.0.input_layernorm", "--recompute-norm"),
        ("activations", "decoder.layers.0", "--recompute-granularity full"),
        ("activations", "output_layer", "no flag of this package"),
        ("main parameters", "", "--reuse-fp32-param"),
        ("optimizer state", "", "--compress-optimizer"),
    ],
)
def test_flags_are_named_that_remove_a_tensor(kind, module, flag):
    assert flag in removed_by(kind, module)


def test_no_peak_is_left_out_of_a_long_curve():
    timeline = Timeline()
    for event in range(10_000):
        timeline.taken(event, 1)
        timeline.released(event)
    timeline.taken(-1, 5 * 2**20)
    timeline.released(-1)
    assert readable(5 * 2**20) == "5.000 MiB"
    assert ">5.000 MiB<" in picture(timeline, {}, "curve")

"""A dump says what modules computed, and the comparison names the first that differs."""

import json
import os
import sys
import types

import pytest
import torch

from mindspeed_core.errors import UserError
from mindspeed_core.feature import hookimpl
from mindspeed_profile.command import main
from mindspeed_profile.dump_backends import MsprobeDump, make_dump
from mindspeed_profile.dump_comparison import compare_dumps
from mindspeed_profile.dump_files import RankDump, read_dump
from mindspeed_profile.dump_options import DumpOptions, read_options
from mindspeed_profile.lines_file import LinesFile
from mindspeed_profile.module_dump import ModuleDump, statistics
from mindspeed_testing import run_world

TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
LAYER = "decoder.layers.3."
FIRST_OF_LAYER = LAYER + "self_attention.linear_proj"


class Spoil:
    """Puts a NaN into layer 3 of tensor-parallel rank 1, before the first step."""

    @hookimpl(wrapper=True)
    def train_step(self, run):
        if run.pg.tp.rank() == 1:
            for chunk in run.model:
                for name, parameter in chunk.named_parameters():
                    if name.endswith(FIRST_OF_LAYER + ".weight"):
                        parameter.data.view(-1)[0] = float("nan")
        return (yield)


TWO = ("--global-batch-size", "2")
"""Two micro-batches."""
CASES = (("tp2", TP2, ()), ("pp2", PP2, ()), ("spoilt", TP2, (Spoil,)))


class Start:
    """Starts from given weights, or takes those that the model is built with."""

    def __init__(self, weights=None):
        self.weights = weights

    @hookimpl(wrapper=True)
    def start_run(self, run):
        from mindspeed_testing.canonical import canonical_parameters, load_canonical

        if self.weights is None:
            self.weights = canonical_parameters(run)
        else:
            load_canonical(run, self.weights)
        return (yield)


def dump_each(folder, weights):
    """Dump healthy runs in several layouts, and one with a NaN."""
    from profiled_run import train_once

    for name, flags, plugins in CASES:
        bad = ("--bad-step-action", "skip") if plugins else ()
        config = ("--npu-datadump", f"{folder}/{name}.json")
        train_once((*TWO, *flags, *bad, *config), 1, [Start(weights), *(one() for one in plugins)])


def dump_alone(folder):
    from profiled_run import train_once

    os.chdir(folder)
    start = Start()
    train_once((*TWO, "--npu-datadump"), 2, [start])
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
    train_once((*TWO, *full, "--npu-datadump"), 1, [start])
    return start.weights


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    for name, *_ in CASES:
        content = {"dump_path": str(folder / name), "step": [0]}
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    (weights,) = run_world("test_datadump:dump_alone", 1, str(folder))
    run_world("test_datadump:dump_each", 2, str(folder), weights)
    return folder


def test_a_nan_in_layer_3_of_tensor_parallel_rank_1_is_named(dumps, capsys):
    assert main(["compare", str(dumps / "tp2"), str(dumps / "spoilt")]) == 1
    printed = capsys.readouterr().out
    assert f"first difference: step 0, forward 0, {FIRST_OF_LAYER}" in printed
    assert "nan 0 ->" in printed


def test_the_comparison_is_data_too(dumps, capsys):
    assert main(["compare", str(dumps / "tp2"), str(dumps / "spoilt"), "--json"]) == 1
    first = json.loads(capsys.readouterr().out)["first"]
    assert first["module"] == FIRST_OF_LAYER
    assert first["direction"] == "forward"


@pytest.mark.parametrize("other", ["tp2", "pp2"])
def test_runs_in_other_layouts_are_the_same(dumps, other, capsys):
    assert main(["compare", str(dumps / "datadump"), str(dumps / other), "--tolerance", "1e-3"]) == 0
    assert " 0 differ" in capsys.readouterr().out


def test_only_the_first_step_is_dumped_and_each_pass_once(dumps):
    (alone,) = read_dump(dumps / "datadump")
    assert {entry["step"] for entry in alone.entries} == {0}
    of_layer = [e for e in alone.entries if e["module"] == "decoder.layers.3"]
    assert [e["call"] for e in of_layer if e["pass"] == "forward"] == [0, 1]
    assert [e["call"] for e in of_layer if e["pass"] == "backward"] == [0, 1]


def test_an_earlier_dump_is_moved_aside(dumps):
    assert sorted(path.name for path in (dumps / "datadump").iterdir()) == [
        "rank00000.1.jsonl",
        "rank00000.jsonl",
    ]


def test_statistics_are_of_finite_values_and_count_the_others():
    found = statistics(torch.tensor([3.0, float("nan"), -4.0, float("inf")], dtype=torch.bfloat16))
    assert (found["nan"], found["inf"], found["min"], found["max"], found["l2"]) == (1, 1, -4.0, 3.0, 5.0)
    assert found["mean"] == -0.5
    assert found["dtype"] == "bfloat16"
    assert statistics(torch.zeros(0))["min"] is None


def entry(module="m", **changes):
    values = {"step": 0, "module": module, "pass": "forward", "call": 0, "tensor": 0, "dtype": "float32"}
    numbers = {"shape": [4], "nan": 0, "inf": 0, "min": -1.0, "max": 1.0, "mean": 0.0, "l2": 2.0, "crc32": 1}
    return {**values, **numbers, **changes}


def rank(*entries, number=0, **layout):
    return RankDump(number, layout, entries, False)


def test_shards_are_put_together_and_whole_tensors_taken_once():
    whole = [rank(entry(shape=[8], l2=5.0, min=-3.0), entry("same", shape=[2]))]
    shards = [
        rank(entry(l2=3.0, min=-3.0, crc32=5), entry("same", shape=[2]), tp=(0, 2)),
        rank(entry(l2=4.0, crc32=6), entry("same", shape=[2]), number=1, tp=(1, 2)),
    ]
    assert compare_dumps(whole, shards, 1e-6).first is None
    shards[1] = rank(entry(l2=4.5, crc32=6), entry("same", shape=[2]), number=1, tp=(1, 2))
    first = compare_dumps(whole, shards, 1e-6).first
    assert first.module == "m"
    assert first.where == "tensor-parallel ranks together"


def test_other_samples_are_refused():
    with pytest.raises(UserError, match="data-parallel sizes 1 and 2"):
        compare_dumps([rank(entry())], [rank(entry(), dp=(0, 2)), rank(entry(), number=1, dp=(1, 2))], 0.1)
    with pytest.raises(UserError, match="no step in common"):
        compare_dumps([rank(entry())], [rank(entry(step=1))], 0.1)


def test_modules_of_one_dump_alone_are_told():
    assert compare_dumps([rank(entry(), entry("a"))], [rank(entry())], 0.1).missing == ("a",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "does not begin with a layout"),
        ("{}\n", "does not begin with a layout"),
        ("not json\n", "line 1 is no JSON"),
        ('{"rank": 0, "layout": {}}\n{"step": 1}\n', "line 2 lacks"),
    ],
)
def test_foreign_files_are_refused(tmp_path, content, message):
    (tmp_path / "rank00000.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_dump(tmp_path)


def test_an_empty_and_a_missing_folder_are_refused(tmp_path, capsys):
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 1
    assert "holds no rank00000.jsonl" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "nowhere"), str(tmp_path)]) == 1
    assert "is no folder" in capsys.readouterr().err


def test_a_line_that_was_cut_short_ends_the_dump(tmp_path):
    lines = [json.dumps({"rank": 0, "layout": {}}), json.dumps(entry()), json.dumps(entry("b"))[:20]]
    (tmp_path / "rank00000.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (found,) = read_dump(tmp_path)
    assert found.cut
    assert [one["module"] for one in found.entries] == ["m"]


def test_a_full_disk_ends_the_dump_with_a_whole_line(tmp_path, monkeypatch, caplog):
    file = LinesFile(tmp_path / "rank00000.jsonl", "--npu-datadump")
    file.add({"a": 1})
    written = os.write

    def full(descriptor, data):
        written(descriptor, data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    file.add({"b": 2})
    monkeypatch.undo()
    file.add({"c": 3})
    assert (tmp_path / "rank00000.jsonl").read_text(encoding="utf-8") == '{"a": 1}\n'
    assert "training goes on" in caplog.text


class Chunk(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x)


class Group:
    def rank(self):
        return 0

    def size(self):
        return 1


def run_of(iteration=0):
    place = types.SimpleNamespace(rank=0)
    return types.SimpleNamespace(
        model=[Chunk()],
        dist=place,
        iteration=iteration,
        pg=types.SimpleNamespace(tp=Group(), pp=Group()),
    )


def test_outside_of_dumped_steps_no_module_has_a_hook(tmp_path):
    run = run_of()
    dump = ModuleDump(run, DumpOptions(path=tmp_path, steps=(1,)))
    hooks = run.model[0].inner._forward_hooks
    with dump.step(run):
        assert not hooks
    run.iteration = 1
    with dump.step(run):
        assert hooks
        run.model[0](torch.ones(1, 2)).sum().backward()
    assert not hooks
    dump.close()
    (found,) = read_dump(tmp_path)
    assert [(one["module"], one["pass"]) for one in found.entries] == [
        ("inner", "forward"),
        ("inner", "backward"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "an object is expected"),
        ("{", "is no JSON file"),
        ('{"step": 3}', "step 3 is no list"),
        ('{"rank": ["x"]}', "rank holds 'x'"),
        ('{"dump_path": 3}', "dump_path 3 is no path"),
        ('{"list": "a"}', "is no list of names"),
    ],
)
def test_a_config_of_another_form_is_refused(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_options([str(path)])


def test_msprobes_form_is_read(tmp_path):
    path = tmp_path / "config.json"
    content = {"task": "statistics", "dump_path": "here", "rank": [0], "step": [1, "3-4"], "level": "L0"}
    path.write_text(json.dumps({**content, "statistics": {"list": ["mlp"]}}), encoding="utf-8")
    found = read_options([str(path)])
    assert (str(found.path), found.steps, found.ranks, found.modules) == ("here", (1, 3, 4), (0,), ("mlp",))


def test_msprobe_dumps_where_it_is_installed_and_a_file_is_given(tmp_path, monkeypatch):
    calls = []

    class Debugger:
        def __init__(self, config_path):
            calls.append(config_path)

        def start(self, model):
            calls.append("start")

        def stop(self):
            calls.append("stop")

        def step(self):
            calls.append("step")

    monkeypatch.setitem(sys.modules, "msprobe", types.ModuleType("msprobe"))
    monkeypatch.setitem(sys.modules, "msprobe.pytorch", types.SimpleNamespace(PrecisionDebugger=Debugger))
    config = tmp_path / "config.json"
    dump = make_dump(run_of(), DumpOptions(config=config))
    assert isinstance(dump, MsprobeDump)
    with pytest.raises(ValueError, match="broken"), dump.step(run_of()):
        raise ValueError("broken")
    assert calls == [str(config), "start", "stop", "step"]
    assert isinstance(make_dump(run_of(), DumpOptions(path=tmp_path)), ModuleDump)


def test_a_msprobe_that_does_not_fit_is_told_and_replaced(tmp_path, monkeypatch, caplog):
    class Unfit:
        def find_spec(self, name, path=None, target=None):
            if name == "msprobe":
                raise RuntimeError("torch is too new")

    monkeypatch.setattr(sys, "meta_path", [Unfit(), *sys.meta_path])
    found = make_dump(run_of(), DumpOptions(path=tmp_path, config=tmp_path / "config.json"))
    assert isinstance(found, ModuleDump)
    assert "torch is too new" in caplog.text

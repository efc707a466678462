"""The profilers that the flags stand for: activities, files, and the calls of torch_npu."""

import gzip
import json
import sys
import types

import pytest
import torch

from mindspeed_profile.backends import make_profiler
from mindspeed_profile.options import ProfileOptions


def options(path, **changes):
    values = {
        "start": 1,
        "end": 2,
        "level": 0,
        "cpu": False,
        "stack": False,
        "memory": False,
        "shapes": False,
        "path": path,
        "ranks": (0,),
    }
    return ProfileOptions(**{**values, **changes})


def record(chosen, rank=0):
    profiler = make_profiler(chosen, "cpu", rank, 8, 0, 3, 4)
    profiler.start()
    torch.randn(16, 16) @ torch.randn(16, 16)
    profiler.step()
    profiler.stop()
    (path,) = chosen.path.iterdir()
    with gzip.open(path) as file:
        return path.name, json.load(file)["traceEvents"]


def test_the_trace_is_named_by_rank_and_steps(tmp_path):
    name, events = record(options(tmp_path / "made" / "here"), rank=7)
    assert name == "rank00007_steps3-4.pt.trace.json.gz"
    assert any(event.get("name") == "aten::matmul" for event in events)


def test_allocations_and_shapes_are_recorded_on_request(tmp_path):
    _, events = record(options(tmp_path, cpu=True, memory=True, shapes=True))
    assert any(event.get("name") == "[memory]" for event in events)
    (product,) = [event for event in events if event.get("name") == "aten::mm"]
    assert product["args"]["Input Dims"] == [[16, 16], [16, 16]]


def test_allocations_are_left_out_by_default(tmp_path):
    _, events = record(options(tmp_path))
    assert not any(event.get("name") == "[memory]" for event in events)


class Names:
    """Attribute access gives the attribute's own name."""

    def __getattr__(self, name):
        return name


@pytest.fixture
def npu(monkeypatch):
    calls = []
    profiler = types.SimpleNamespace(
        ProfilerActivity=Names(),
        ProfilerLevel=Names(),
        AiCMetrics=Names(),
        ExportType=Names(),
        schedule=lambda **arguments: arguments,
        tensorboard_trace_handler=lambda folder, **options: (folder, options),
        _ExperimentalConfig=lambda **arguments: arguments,
        profile=lambda **arguments: calls.append(arguments) or "profiler",
    )
    module = types.ModuleType("torch_npu")
    module.profiler = profiler
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return calls


@pytest.mark.parametrize(
    ("level", "metrics"), [(0, "AiCoreNone"), (1, "PipeUtilization"), (2, "PipeUtilization")]
)
def test_the_npu_profiler_gets_level_and_metrics(npu, tmp_path, level, metrics):
    assert make_profiler(options(tmp_path, level=level, cpu=True), "npu", 2, 8, 1, 10, 12) == "profiler"
    (call,) = npu
    assert call["activities"] == ["NPU", "CPU"]
    assert call["schedule"] == {"wait": 0, "warmup": 1, "active": 2, "repeat": 1}
    assert call["experimental_config"] == {"profiler_level": f"Level{level}", "aic_metrics": metrics}
    folder, handling = call["on_trace_ready"]
    assert folder == str(tmp_path)
    assert handling == {"worker_name": "rank00002", "analyse_flag": True, "async_mode": False}
    assert call["with_modules"] == (level == 2)


def test_the_npu_profiler_gets_metrics_and_forms(npu, tmp_path):
    chosen = options(tmp_path, level=1, metrics="L2Cache", exports=("db", "perfetto", "text"))
    make_profiler(chosen, "npu", 0, 1, 1, 10, 12)
    config = npu[0]["experimental_config"]
    assert config["aic_metrics"] == "L2Cache"
    assert config["export_type"] == ["Db", "Text"]


@pytest.mark.parametrize(
    ("chosen", "ranks", "world", "handling"),
    [
        ("", (0,), 64, (True, False)),
        ("", (-1,), 8, (True, False)),
        ("", (-1,), 16, (False, False)),
        ("sync", (-1,), 16, (True, False)),
        ("async", (0,), 1, (True, True)),
        ("off", (0,), 1, (False, False)),
    ],
)
def test_many_ranks_are_analysed_later_unless_it_is_asked_for(npu, tmp_path, chosen, ranks, world, handling):
    make_profiler(options(tmp_path, analysis=chosen, ranks=ranks), "npu", 0, world, 1, 10, 12)
    _, found = npu[0]["on_trace_ready"]
    assert (found["analyse_flag"], found["async_mode"]) == handling


def test_the_command_of_a_later_analysis_is_printed_once(npu, tmp_path, caplog):
    for rank in (0, 1):
        make_profiler(options(tmp_path, analysis="off", ranks=(-1,)), "npu", rank, 16, 1, 10, 12)
    (record,) = caplog.records
    assert f"analyse('{tmp_path}')" in record.getMessage().replace("'\"'\"'", "'")

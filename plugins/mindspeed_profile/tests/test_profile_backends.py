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
    profiler = make_profiler(chosen, "cpu", rank, 0, 3, 4)
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
        schedule=lambda **arguments: arguments,
        tensorboard_trace_handler=lambda folder, worker_name: (folder, worker_name),
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
    assert make_profiler(options(tmp_path, level=level, cpu=True), "npu", 2, 1, 10, 12) == "profiler"
    (call,) = npu
    assert call["activities"] == ["NPU", "CPU"]
    assert call["schedule"] == {"wait": 0, "warmup": 1, "active": 2, "repeat": 1}
    assert call["experimental_config"] == {"profiler_level": f"Level{level}", "aic_metrics": metrics}
    assert call["on_trace_ready"] == (str(tmp_path), "rank00002")
    assert call["with_modules"] == (level == 2)

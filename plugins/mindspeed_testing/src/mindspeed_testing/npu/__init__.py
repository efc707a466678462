"""Checking the NPU branch of a plugin on a machine without an NPU.

torch_npu needs the libraries of the device runtime before it can be imported. `build_stubs` makes libraries
that export what the installed torch_npu asks for and refuse to do anything; with them the real package is
imported, and its real schemas, autograd formulas and shape functions run on fake tensors, forward and
backward. `value_device` adds numbers: what kernels compute is then taken from their written contracts.
Speed is not checked: only a device can do that.

``python -m mindspeed_testing.npu PATHS`` runs the tests in files ``npu_*.py`` below ``PATHS`` this way,
and fails when a source calls something of torch_npu that no test ran. Importing this package loads no torch,
since torch itself cannot be imported beside torch_npu before the libraries exist.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_megatron.devices.torch_npu_uses import ApiUse, api_uses
    from mindspeed_testing.npu.calls import Call, CallResult, run_call, run_calls
    from mindspeed_testing.npu.device import ValueDevice, value_device
    from mindspeed_testing.npu.fake import FakeNpu, fake_npu
    from mindspeed_testing.npu.scenario_worlds import ScenarioWorlds
    from mindspeed_testing.npu.scenarios import device_scenarios
    from mindspeed_testing.npu.schemas import compare_snapshot, schema_snapshot
    from mindspeed_testing.npu.stubs import Stubs, build_stubs
    from mindspeed_testing.npu.training import ShapeOnlyTraining, shape_only_training
    from mindspeed_testing.npu.value_training import (
        ValueTraining,
        assert_equals_cpu,
        run_value_world,
        value_training,
    )
    from mindspeed_testing.npu.world import fake_world

_NAMES = {
    "mindspeed_megatron.devices.torch_npu_uses": ("ApiUse", "api_uses"),
    "calls": ("Call", "CallResult", "run_call", "run_calls"),
    "device": ("ValueDevice", "value_device"),
    "fake": ("FakeNpu", "fake_npu"),
    "scenario_worlds": ("ScenarioWorlds",),
    "scenarios": ("device_scenarios",),
    "schemas": ("compare_snapshot", "schema_snapshot"),
    "stubs": ("Stubs", "build_stubs"),
    "training": ("ShapeOnlyTraining", "shape_only_training"),
    "value_training": ("ValueTraining", "assert_equals_cpu", "run_value_world", "value_training"),
    "world": ("fake_world",),
}
"""The names of each module."""

__all__ = [
    "ApiUse",
    "Call",
    "CallResult",
    "FakeNpu",
    "ScenarioWorlds",
    "ShapeOnlyTraining",
    "Stubs",
    "ValueDevice",
    "ValueTraining",
    "api_uses",
    "assert_equals_cpu",
    "build_stubs",
    "compare_snapshot",
    "device_scenarios",
    "fake_npu",
    "fake_world",
    "run_call",
    "run_calls",
    "run_value_world",
    "schema_snapshot",
    "shape_only_training",
    "value_device",
    "value_training",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: half of them need torch."""
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(module if "." in module else f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Checking the NPU branch of a plugin on a machine without an NPU.

torch_npu needs the libraries of the device runtime before it can be imported. `build_stubs` makes libraries
that export what the installed torch_npu asks for and refuse to do anything; with them the real package is
imported, and its real schemas, autograd formulas and shape functions run on fake tensors, forward and
backward. Values, kernels and speed are not checked: only a device can do that.

``python -m mindspeed_testing.npu PATHS`` runs the tests in files ``npu_*.py`` below ``PATHS`` this way,
and fails when a source calls something of torch_npu that no test ran. Importing this package loads no torch,
since torch itself cannot be imported beside torch_npu before the libraries exist.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_testing.npu.calls import Call, CallResult, run_call, run_calls
    from mindspeed_testing.npu.fake import FakeNpu, fake_npu
    from mindspeed_testing.npu.schemas import compare_snapshot, schema_snapshot
    from mindspeed_testing.npu.sources import ApiUse, api_uses
    from mindspeed_testing.npu.stubs import Stubs, build_stubs
    from mindspeed_testing.npu.training import ShapeOnlyTraining, shape_only_training
    from mindspeed_testing.npu.world import fake_world

_HOMES = {
    "Call": "calls",
    "CallResult": "calls",
    "ApiUse": "sources",
    "FakeNpu": "fake",
    "ShapeOnlyTraining": "training",
    "Stubs": "stubs",
    "build_stubs": "stubs",
    "api_uses": "sources",
    "compare_snapshot": "schemas",
    "fake_npu": "fake",
    "fake_world": "world",
    "run_call": "calls",
    "run_calls": "calls",
    "schema_snapshot": "schemas",
    "shape_only_training": "training",
}

__all__ = [
    "ApiUse",
    "Call",
    "CallResult",
    "FakeNpu",
    "ShapeOnlyTraining",
    "Stubs",
    "api_uses",
    "build_stubs",
    "compare_snapshot",
    "fake_npu",
    "fake_world",
    "run_call",
    "run_calls",
    "schema_snapshot",
    "shape_only_training",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: half of them need torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

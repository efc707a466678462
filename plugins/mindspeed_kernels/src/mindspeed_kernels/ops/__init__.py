"""Operators as functions, one module each: the reference, the fast paths per device, and the public call.

The public call picks the fast path by the device of its first tensor. A module imports torch only;
``torch_npu`` is imported by an NPU path when it runs.
"""

from __future__ import annotations

from mindspeed_kernels.ops.attention import attention
from mindspeed_kernels.ops.operator import Operator
from mindspeed_kernels.ops.rms_norm import rms_norm
from mindspeed_kernels.ops.swiglu import swiglu

OPERATORS: dict[str, Operator] = {operator.name: operator for operator in (attention, rms_norm, swiglu)}
"""Every operator by name."""

__all__ = ["OPERATORS", "Operator", "attention", "rms_norm", "swiglu"]

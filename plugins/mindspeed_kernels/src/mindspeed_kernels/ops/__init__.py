"""Operators as functions: one module each, with the definition, the fast paths and the contract.

Call them like functions; the backend follows from the device, the dtypes and the options of the call:

    from mindspeed_kernels.ops import rms_norm, use

    y = rms_norm(x, gamma, 1e-5)
    with use(rms_norm="reference"):
        slow = rms_norm(x, gamma, 1e-5)

A choice is forced by ``use``, by the flag ``--ops-backend OP=BACKEND`` or by the environment variable
``MINDSPEED_OPS`` (read when an operator meets a kind of call for the first time). A forced backend that
cannot serve is an error; passing over a better backend by itself is said once, as a warning of the logger
``mindspeed_kernels.ops``. ``mindspeed-features ops`` lists every backend and why it cannot run here.

To add an operator, write one module:

1. a reference, the readable definition in differentiable torch operations that work on every device;
2. ``name = Operator("name", reference, contract=..., key=..., saved=..., samples=...)``;
3. ``@name.backend("cpu", ("cpu",), priority=..., supports=..., contract=...)`` on each fast path. A fast path
   without backward says ``differentiable=False``; then calls that need gradients are refused;
4. its import below. ``tests/test_conformance.py`` compares every backend that can run with the reference on
   the samples: values, gradients, one graph under ``torch.compile``.

A backend from another package is a `Backend` in an iterable that an entry point of the group
``mindspeed_kernels.backends`` names.
"""

from __future__ import annotations

from mindspeed_kernels.ops.attention import attention
from mindspeed_kernels.ops.catalog import Explanation, explain
from mindspeed_kernels.ops.choice import BackendError, checking, use
from mindspeed_kernels.ops.contract import ContractError
from mindspeed_kernels.ops.operator import OPERATORS, Backend, Operator, Sample
from mindspeed_kernels.ops.rms_norm import rms_norm
from mindspeed_kernels.ops.swiglu import swiglu

__all__ = [
    "OPERATORS",
    "Backend",
    "BackendError",
    "ContractError",
    "Explanation",
    "Operator",
    "Sample",
    "attention",
    "checking",
    "explain",
    "rms_norm",
    "swiglu",
    "use",
]

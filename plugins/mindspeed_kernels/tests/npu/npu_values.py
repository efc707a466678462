"""Every operator's NPU backends with numbers: results, changed arguments and gradients of the reference."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

from mindspeed_kernels import ops
from mindspeed_kernels.conformance import check_backend
from mindspeed_kernels.ops import OPERATORS
from mindspeed_testing.npu import value_device

for found in iter_modules(ops.__path__):
    import_module(f"{ops.__name__}.{found.name}")

BACKENDS = [
    (name, backend.name)
    for name, operator in sorted(OPERATORS.items())
    for backend in operator.backends.values()
    if operator.samples is not None and "npu" in backend.devices and "cpu" not in backend.devices
]


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_a_backend_of_the_device_computes_the_reference_and_every_gradient(name, backend):
    with value_device():
        dtypes = (torch.bfloat16, torch.float32)
        assert sum(check_backend(name, backend, device="npu", dtype=dtype) for dtype in dtypes)


def test_the_norm_s_epsilon_reaches_the_kernel():
    from mindspeed_kernels.ops import rms_norm

    with value_device():
        x, gamma = torch.ones(2, 16, device="npu"), torch.ones(16, device="npu")
        torch.testing.assert_close(rms_norm(x, gamma, 1.0), x / 2**0.5)

"""Every operator's NPU backends on every sample: shapes and dtypes of the reference, and every gradient."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch
from torch.utils._pytree import tree_map_only

from mindspeed_kernels import ops
from mindspeed_kernels.conformance import samples_of
from mindspeed_kernels.ops import OPERATORS
from mindspeed_testing.npu import Call, fake_npu, run_call

for found in iter_modules(ops.__path__):
    import_module(f"{ops.__name__}.{found.name}")

BACKENDS = [
    (name, backend.name)
    for name, operator in sorted(OPERATORS.items())
    for backend in operator.backends.values()
    if operator.samples is not None and "npu" in backend.devices
]
DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_a_backend_of_the_device_has_the_reference_s_shapes_and_every_gradient(name, backend):
    operator, chosen = OPERATORS[name], OPERATORS[name].backends[backend]
    served = 0
    for dtype in DTYPES:
        for index, sample in enumerate(samples_of(operator, "cpu", dtype)):
            with fake_npu():
                if chosen.refusal(operator.call_of(*moved(sample.args), **moved(sample.options))):
                    continue
            served += 1
            run_call(as_call(operator, chosen, sample, f"{name}[{backend}] sample {index} in {dtype}"))
    assert served, f"{name}[{backend}] serves no sample"


def as_call(operator, backend, sample, title):
    """A call of the backend's function; results are compared with those of the reference on real tensors."""
    with torch.no_grad():
        copies = tree_map_only(torch.Tensor, torch.clone, (sample.args, dict(sample.options)))
        expected = comparable(operator, operator.reference(*copies[0], **copies[1]))
    follow = sample.backward and backend.differentiable
    options = dict(sample.options)

    def function(*args):
        tensors = {key: moved(value, follow=False) for key, value in options.items()}
        return comparable(operator, backend.function(*args, **tensors))

    return Call(
        title,
        function,
        lambda npu: moved(sample.args, follow),
        like=lambda *args: expected,
        backward=follow,
    )


def comparable(operator, result):
    return result if operator.comparable is None else operator.comparable(result)


def moved(values, follow=False):
    """The same shapes on the fake device; floating tensors require grad where gradients are asked for."""

    def move(tensor):
        return torch.empty(
            tensor.shape,
            dtype=tensor.dtype,
            device="npu",
            requires_grad=follow and tensor.is_floating_point(),
        )

    return tree_map_only(torch.Tensor, move, values)

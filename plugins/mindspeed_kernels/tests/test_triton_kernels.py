"""The Triton kernels: their values by Triton's interpreter, and their compilation for other devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_cases import CASES, LIGER
from triton_cases import OPERATORS as WITH_KERNELS

from mindspeed_kernels.call import Call
from mindspeed_kernels.conformance import samples_of
from mindspeed_kernels.device_kernels.launching import launch
from mindspeed_kernels.ops import OPERATORS
from mindspeed_megatron.planned_kernels import kernels_of

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def interpreted():
    """The outcome of every case; the interpreter is chosen before Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("triton_cases.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*CASES, *LIGER])
def test_a_kernel_computes_the_definition(interpreted, name):
    assert interpreted[name] == ""


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_plan_for_a_device_takes_the_kernel_and_its_memory(name):
    operator = OPERATORS[name]
    with kernels_of("cuda"), FakeTensorMode() as mode:
        for sample in samples_of(operator, dtype=torch.bfloat16)[:1]:
            args = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in sample.args]
            leaves = [
                a.requires_grad_() for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()
            ]
            assert operator.choose(operator.call_of(*args)).name == "triton"
            expected = operator.reference(*args)
            result = operator(*args)
            assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
            gradients = torch.autograd.grad(result.sum(), leaves)
            assert [g.shape for g in gradients] == [leaf.shape for leaf in leaves]


def test_a_plan_does_not_choose_the_kernel_of_a_later_run():
    x, operator = torch.randn(4, 2, 64, requires_grad=True), OPERATORS["swiglu"]
    with kernels_of("cuda"), FakeTensorMode() as mode:
        operator(mode.from_tensor(x))
    torch.testing.assert_close(operator(x), operator.reference(x))


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_float64_is_left_to_the_composition(name):
    operator = OPERATORS[name]
    call = operator.call_of(*samples_of(operator, dtype=torch.float64)[0].args)
    assert "float64" in operator.backends["triton"].supports(Call("cuda", call.arguments))


class Recorded:
    """Stands for a kernel of Triton, and for what it compiles."""

    def __init__(self, log, compiles=True):
        self.log, self.compiles = log, compiles

    def __getitem__(self, grid):
        def call(*arguments, **options):
            self.log.append(("found" if self.compiles else "launched", grid, len(arguments)))
            return Recorded(self.log, compiles=False) if self.compiles else None

        return call


def test_a_launch_of_a_known_kind_goes_past_triton_s_search():
    log = []
    kernel = Recorded(log)
    x, y = torch.zeros(64), torch.zeros(64)
    for tensors, numbers in (
        ((x, y), (3,)),
        ((x, y), (3,)),
        ((x, y), (4,)),
        ((x[1:], y), (3,)),
        ((x, y), (3,)),
    ):
        launch(kernel, (7,), tensors, numbers, (128,), 4)
    kinds = [what for what, _, _ in log]
    assert kinds == ["found", "launched", "found", "found", "launched"]
    assert log[1] == ("launched", (7, 1, 1), 4)


@pytest.mark.thorough
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_for_a_device(capability):
    from kernel_signatures import compiled_kernels

    found = compiled_kernels(capability)
    assert len(found) > 8
    for name, assembly in found.items():
        assert "ld.global" in assembly, name
        # Spilled registers are local memory.
        assert ".local" not in assembly, f"{name} keeps registers in memory"

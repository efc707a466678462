"""Every backend that can run here equals the reference, loses no gradient, and is captured in one graph."""

from functools import partial

import pytest
import torch

from mindspeed_kernels.conformance import check_backend, describe, outcome, samples_of
from mindspeed_kernels.ops import OPERATORS, Backend, Sample, explain, use

WITH_SAMPLES = sorted(name for name, operator in OPERATORS.items() if operator.samples is not None)
RUNNING = [
    (name, item.backend)
    for name in WITH_SAMPLES
    for item in explain(name, "cpu")
    # Compiling takes longer than everything else here together.
    if not item.missing and item.backend not in ("reference", "compiled")
]


@pytest.mark.parametrize(("operator", "backend"), RUNNING)
def test_a_backend_equals_the_reference(operator, backend):
    served = sum(
        check_backend(operator, backend, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    )
    assert served > 0


@pytest.mark.parametrize("name", WITH_SAMPLES)
def test_references_have_exact_gradients(name):
    operator = OPERATORS[name]
    if not operator.backends["reference"].differentiable:
        return
    for sample in samples_of(operator, dtype=torch.float64):
        inputs = [v for v in sample.args if isinstance(v, torch.Tensor) and v.is_floating_point()]
        small = all(tensor.numel() <= 600 for tensor in inputs)
        if not (inputs and sample.backward and small and len(inputs) == len(sample.args)):
            continue
        leaves = [tensor.requires_grad_() for tensor in inputs]
        function = partial(operator.reference, **sample.options)
        assert torch.autograd.gradcheck(function, leaves), describe(sample)


@pytest.mark.parametrize("name", WITH_SAMPLES)
def test_an_operator_is_captured_in_one_graph(name):
    operator = OPERATORS[name]
    sample = samples_of(operator)[0]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a, **o: operator(*a, **o), backend="aot_eager", fullgraph=True)
    got, expected = outcome(compiled, sample), outcome(operator, sample)
    torch.testing.assert_close(got.results, expected.results)
    torch.testing.assert_close(got.gradients, expected.gradients)


@pytest.mark.parametrize("name", WITH_SAMPLES)
def test_every_differentiable_operator_hands_gradients_to_its_inputs(name):
    operator = OPERATORS[name]
    for sample in samples_of(operator):
        if not sample.backward:
            continue
        expected = outcome(operator.backends["reference"].function, sample).gradients
        got = outcome(operator, sample).gradients
        assert [g is None for g in got] == [g is None for g in expected], describe(sample)


def test_a_backend_that_loses_a_gradient_is_found_out():
    operator = OPERATORS["swiglu"]
    operator.add(Backend("swiglu", "detached", lambda x, dim=-1: operator.reference(x.detach(), dim)))
    try:
        with pytest.raises(AssertionError, match="a gradient is None"):
            check_backend("swiglu", "detached")
    finally:
        operator.remove("detached")


def test_a_forced_backend_serves_its_samples():
    sample = Sample((torch.randn(3, 8),))
    with use(swiglu="reference"):
        assert "SwiGLU" not in type(OPERATORS["swiglu"](sample.args[0].requires_grad_()).grad_fn).__name__

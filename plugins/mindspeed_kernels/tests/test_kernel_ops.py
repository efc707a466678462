"""Operators against their references: values, gradients, precision, what is kept for backward, refusals."""

import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_kernels.ops import OPERATORS, rms_norm, swiglu

FAST = settings(max_examples=25, deadline=None)


def kept_bytes(function, *inputs):
    """Bytes of the distinct storages that autograd keeps for backward, weights of at most 1 KiB left out."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(*inputs)
    del result
    return sum(size for size in storages.values() if size > 1024)


def gradients(function, tensors, seed=0):
    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    result = function(*tensors)
    weight = torch.randn(result.shape, generator=torch.Generator().manual_seed(seed)).to(result.dtype)
    (result * weight).sum().backward()
    return result.detach(), [tensor.grad for tensor in tensors]


def error(value, truth):
    return float((value.double() - truth).abs().max() / truth.abs().max().clamp_min(1e-30))


@FAST
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    width=st.sampled_from([1, 7, 64, 129]),
    zero_centered=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_rms_norm_equals_its_reference(shape, width, zero_centered, seed):
    torch.manual_seed(seed)
    x, weight = torch.randn(*shape, width), torch.randn(width)
    fast, fast_grads = gradients(lambda x, w: rms_norm(x, w, 1e-5, zero_centered=zero_centered), [x, weight])
    slow, slow_grads = gradients(lambda x, w: rms_norm.reference(x, w, 1e-5, zero_centered), [x, weight])
    torch.testing.assert_close(fast, slow, rtol=2e-5, atol=2e-5)
    for got, expected in zip(fast_grads, slow_grads):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_gradients_are_exact_in_float64(zero_centered):
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, w: rms_norm(x, w, 1e-5, zero_centered=zero_centered), (x, weight)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_is_no_less_precise_than_torch(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(64, 2, 256).to(dtype), torch.randn(256).to(dtype)
    truth, truth_grads = gradients(
        lambda x, w: torch.nn.functional.rms_norm(x, (256,), w, 1e-5), [x.double(), weight.double()]
    )
    ours, our_grads = gradients(lambda x, w: rms_norm(x, w, 1e-5), [x, weight])
    theirs, their_grads = gradients(
        lambda x, w: torch.nn.functional.rms_norm(x, (256,), w, 1e-5), [x, weight]
    )
    assert error(ours, truth) <= 1.1 * error(theirs, truth)
    # The output gradient that reaches both is rounded alike, so the gradients compare as well.
    for got, other, expected in zip(our_grads, their_grads, truth_grads):
        assert error(got, expected) <= max(1.1 * error(other, expected), 2 * torch.finfo(dtype).eps)


def test_rms_norm_of_zero_rows_is_zero():
    x = torch.zeros(2, 8, requires_grad=True)
    y = rms_norm(x, torch.ones(8), 1e-5)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 8))
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_keeps_its_input_and_one_number_per_row(dtype):
    x = torch.randn(128, 2, 512).to(dtype).requires_grad_()
    weight = torch.ones(512, dtype=dtype, requires_grad=True)
    kept = kept_bytes(lambda x, w: rms_norm(x, w, 1e-5), x, weight)
    assert kept <= 1.05 * x.untyped_storage().nbytes() + weight.untyped_storage().nbytes()


@FAST
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    half=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_swiglu_equals_its_reference(shape, half, seed):
    torch.manual_seed(seed)
    x = torch.randn(*shape, 2 * half)
    fast, fast_grads = gradients(swiglu, [x])
    slow, slow_grads = gradients(swiglu.reference, [x])
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(fast_grads[0], slow_grads[0])


def test_swiglu_works_block_by_block_on_large_inputs():
    torch.manual_seed(0)
    x = torch.randn(301, 1024)
    fast, fast_grads = gradients(swiglu, [x])
    slow, slow_grads = gradients(swiglu.reference, [x])
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(fast_grads[0], slow_grads[0])


def test_swiglu_gradients_are_exact_in_float64():
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, (x,))


def test_swiglu_rounds_once_in_bfloat16():
    torch.manual_seed(0)
    x = torch.randn(64, 256).bfloat16()
    expected = swiglu.reference(x.double()).bfloat16()
    assert error(swiglu(x), expected.double()) <= torch.finfo(torch.bfloat16).eps


def test_swiglu_keeps_its_input_only():
    x = torch.randn(256, 512, requires_grad=True)
    assert kept_bytes(swiglu, x) == x.untyped_storage().nbytes()


def test_swiglu_refuses_an_odd_width():
    with pytest.raises(ValueError, match="must be even, got 7"):
        swiglu(torch.randn(2, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "npu_rotary_position_embedding"])
def test_blocks_of_rows_give_what_all_rows_at_once_give(name, dtype, monkeypatch):
    """Seven rows, two or three at a time: the last block is shorter, and memory is used again."""
    torch.manual_seed(0)
    angles = torch.randn(7, 1, 1, 8)
    tensors, others = {
        "rms_norm": ((torch.randn(7, 16).to(dtype), torch.randn(16).to(dtype)), ()),
        "swiglu": ((torch.randn(7, 16).to(dtype),), ()),
        "npu_rotary_position_embedding": ((torch.randn(7, 2, 1, 8).to(dtype),), (angles.cos(), angles.sin())),
    }[name]
    monkeypatch.setattr(sys.modules[f"mindspeed_kernels.ops.{name}"], "_CACHED_ELEMENTS", 40)
    outcomes = []
    for function in (OPERATORS[name], OPERATORS[name].reference):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        result = function(*leaves, *others)
        gradient = torch.linspace(-1, 1, result.numel()).view(result.shape).to(dtype)
        outcomes.append((result, *torch.autograd.grad(result, leaves, gradient)))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for mine, other in zip(*outcomes):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def test_every_operator_has_a_fast_path_for_every_platform():
    lacking = [
        (name, device)
        for name in ("rms_norm", "swiglu", "npu_fusion_attention", "npu_fusion_attention_grad")
        for device in ("cpu", "cuda", "npu")
        if not any(b.runs_on(device) and b.name != "reference" for b in OPERATORS[name].backends.values())
    ]
    assert lacking == []


CALLS = {
    "rms_norm": (lambda x, weight: rms_norm(x, weight, 1e-5), [(4, 2, 8), (8,)]),
    "swiglu": (swiglu, [(4, 2, 8)]),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_operators_train_on_fake_tensors(name):
    function, shapes = CALLS[name]
    with FakeTensorMode():
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        function(*inputs).sum().backward()
    assert [tensor.grad.shape for tensor in inputs] == [torch.Size(shape) for shape in shapes]


@pytest.mark.parametrize("name", sorted(CALLS))
def test_operators_take_the_path_of_a_fake_device(name):
    function, shapes = CALLS[name]
    with FakeTensorMode():
        assert function(*[torch.randn(shape, device="cuda") for shape in shapes]).device.type == "cuda"


class RecordingNpu(types.ModuleType):
    """Stands for torch_npu: records the calls and computes on the CPU."""

    def __init__(self):
        super().__init__("torch_npu")
        self.calls = []

    def npu_rms_norm(self, x, gamma, epsilon=1e-6):
        self.calls.append(("npu_rms_norm", x.dtype, gamma.dtype, epsilon))
        return rms_norm.reference(x, gamma, epsilon), None

    def npu_swiglu(self, x, dim=-1):
        self.calls.append(("npu_swiglu", dim))
        return swiglu.reference(x)


@pytest.fixture
def npu(monkeypatch):
    module = RecordingNpu()
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module


def test_the_npu_path_scales_in_the_dtype_of_the_input(npu):
    x, weight = torch.randn(2, 8).bfloat16(), torch.randn(8)
    rms_norm.backends["npu"].function(x, weight, 1e-6, zero_centered=True)
    assert npu.calls == [("npu_rms_norm", torch.bfloat16, torch.bfloat16, 1e-6)]


def test_the_npu_path_of_swiglu_splits_the_last_dimension(npu):
    x = torch.randn(2, 8)
    torch.testing.assert_close(swiglu.backends["npu"].function(x), swiglu.reference(x))
    assert npu.calls == [("npu_swiglu", -1)]

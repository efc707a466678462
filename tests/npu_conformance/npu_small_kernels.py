"""Contracts of small kernels, such as norms and SwiGLU: refusals, values, and memory left unwritten."""

from __future__ import annotations

import pytest
import torch

from mindspeed_testing.npu import value_device
from mindspeed_testing.npu.kernels import all_kernels
from mindspeed_testing.npu.kernels.contract import KernelRefusal


def made(*shape, dtype=torch.float32, requires_grad=False):
    count = torch.Size(shape).numel()
    values = torch.linspace(-1, 1, max(1, count), dtype=torch.float64)[:count].reshape(shape)
    return values.to("npu", dtype).requires_grad_(requires_grad)


HALF = torch.bfloat16
REFUSED = [
    ("npu_rms_norm", "gamma are", lambda n: n.npu_rms_norm(made(2, 8), made(8, dtype=HALF))),
    ("npu_rms_norm", "no dimension", lambda n: n.npu_rms_norm(made(0, 8), made(8))),
    ("npu_rms_norm", "last dimensions", lambda n: n.npu_rms_norm(made(2, 8), made(4))),
    ("npu_rms_norm", "not negative", lambda n: n.npu_rms_norm(made(2, 8), made(8), -1.0)),
    ("npu_swiglu", "even", lambda n: n.npu_swiglu(made(2, 7))),
    ("npu_swiglu", "one of input's", lambda n: n.npu_swiglu(made(2, 8), 2)),
    (
        "npu_add_layer_norm",
        "one dimension",
        lambda n: n.npu_add_layer_norm(made(2, 3, 4), made(2, 3, 4), made(3, 4), made(3, 4)),
    ),
    ("npu_rotary_mul", "below 896", lambda n: n.npu_rotary_mul(*(made(2, 1, 1, 896) for _ in range(3)))),
    (
        "npu_rotary_mul",
        "whole batch",
        lambda n: n.npu_rotary_mul(made(4, 2, 3, 8), *(made(4, 2, 1, 8) for _ in "ab"), "interleave"),
    ),
    ("npu_rotary_mul", "half or interleave", lambda n: n.npu_rotary_mul(*[made(1, 1, 1, 8)] * 3, "quarter")),
    (
        "npu_scaled_masked_softmax",
        "mask is bool",
        lambda n: n.npu_scaled_masked_softmax(made(1, 1, 2, 4), made(1, 1, 2, 4), 1.0, False),
    ),
    (
        "npu_scaled_masked_softmax",
        "b or 1",
        lambda n: n.npu_scaled_masked_softmax(made(2, 1, 2, 4), made(1, 1, 1, 4) > 0, 1.0, False),
    ),
]


@pytest.mark.parametrize(("operation", "rule", "call"), REFUSED)
def test_a_call_outside_the_contract_raises_and_names_the_rule(operation, rule, call):
    import torch_npu

    with value_device(), pytest.raises((KernelRefusal, RuntimeError), match=rule) as raised:
        call(torch_npu)
    assert operation in str(raised.value)


def test_the_generations_differ_in_bf16_and_alignment():
    import torch_npu

    with value_device(soc="310P"):
        with pytest.raises(KernelRefusal, match="310P: input, gamma are"):
            torch_npu.npu_rms_norm(made(2, 8, dtype=HALF), made(8, dtype=HALF))
        with pytest.raises(KernelRefusal, match="64 bytes"):
            torch_npu.npu_swiglu(made(2, 16))
        assert torch_npu.npu_swiglu(made(2, 32)).shape == (2, 16)
    with value_device(soc="950"):
        assert torch_npu.npu_rms_norm(made(0, 8), made(8))[0].shape == (0, 8)


def test_layer_norm_of_a_sum_keeps_the_sum_only_on_request():
    import torch_npu

    with value_device():
        arguments = made(2, 8), made(2, 8), made(8), made(8)
        assert torch_npu.npu_add_layer_norm(*arguments)[3].isnan().all()
        kept = torch_npu.npu_add_layer_norm(*arguments, 1e-5, True)[3]
        torch.testing.assert_close(kept, arguments[0] + arguments[1])


def test_layer_norm_s_backward_wants_the_weight_in_the_dtype_of_the_input():
    import torch_npu

    with value_device():
        x = made(2, 8, dtype=HALF, requires_grad=True)
        norm = torch_npu.npu_add_layer_norm(x, made(2, 8, dtype=HALF), made(8), made(8))[0]
        with pytest.raises(KernelRefusal, match="npu_add_layer_norm_backward"):
            norm.sum().backward()


def test_statistics_of_layer_norm_are_unwritten_on_310p():
    import torch_npu

    with value_device(soc="310P"):
        _, mean, rstd, _ = torch_npu.npu_add_layer_norm(made(2, 8), made(2, 8), made(8), made(8))
        assert mean.isnan().all()
        assert rstd.isnan().all()


def test_gradients_of_angles_that_nobody_asked_for_are_unwritten():
    with value_device():
        x, angle = made(3, 2, 1, 8), made(3, 1, 1, 8)
        to_x, to_cos, to_sin = torch.ops.npu.npu_rotary_mul_backward(x, x, angle, angle, "half")
        assert not to_x.isnan().any()
        assert to_cos.isnan().all()
        assert to_sin.isnan().all()


def test_a_row_that_is_masked_as_a_whole_gets_equal_weights_from_the_kernel_and_zeros_from_the_operator():
    import torch_npu

    from mindspeed_kernels.ops import scaled_masked_softmax

    with value_device():
        x, mask = made(1, 1, 32, 32), torch.zeros(1, 1, 32, 32, dtype=torch.bool, device="npu")
        mask[..., 5, :] = True
        weights = torch_npu.npu_scaled_masked_softmax(x, mask, 1.0, False)
        assert weights[0, 0, 5].tolist() == [1 / 32] * 32
        assert scaled_masked_softmax(x, mask, 1.0)[0, 0, 5].tolist() == [0.0] * 32


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotation_and_its_gradients_are_those_of_complex_numbers(mode):
    import torch_npu

    def rotated(x, cos, sin):
        first, second = x.chunk(2, -1) if mode == "half" else (x[..., ::2], x[..., 1::2])
        c, s = (a.chunk(2, -1)[0] if mode == "half" else a[..., ::2] for a in (cos, sin))
        turned = torch.complex(first, second) * torch.complex(c.expand_as(first), s.expand_as(first))
        parts = turned.real, turned.imag
        return torch.cat(parts, -1) if mode == "half" else torch.stack(parts, -1).flatten(-2)

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 2, 3, 8, generator=generator), torch.randn(5, 2, 3, 8, generator=generator)
    angles = torch.randn(5, 1, 1, 4, generator=generator)
    whole = torch.cat([angles] * 2, -1) if mode == "half" else angles.repeat_interleave(2, -1)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (rotated(theirs, whole.cos(), whole.sin()) * weight).sum().backward()
    with value_device():
        moved = ours.detach().to("npu").requires_grad_()
        result = torch_npu.npu_rotary_mul(moved, whole.cos().to("npu"), whole.sin().to("npu"), mode)
        (result * weight.to("npu")).sum().backward()
        torch.testing.assert_close(result.detach().cpu(), rotated(x, whole.cos(), whole.sin()))
        torch.testing.assert_close(moved.grad.cpu(), theirs.grad)


def test_a_cast_of_the_memory_format_keeps_the_values():
    with value_device() as device:
        x = made(2, 4)
        assert torch.equal(torch.ops.npu.npu_format_cast(x, 2), x)
        assert device.count("npu_format_cast") == 1


def test_no_two_rules_of_a_kernel_say_the_same():
    for kernel in all_kernels().values():
        said = [(rule.text, rule.socs) for rule in kernel.rules]
        assert len(said) == len(set(said)), kernel.operation


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_gradient_of_gathered_numbers_is_added_where_they_were(dim):
    index = torch.tensor([[[0, 1, 1]], [[2, 0, 2]]])
    gradients = []
    with value_device() as device:
        for place in ("npu", "cpu"):
            x = made(3, 3, 4).cpu().to(place).requires_grad_()
            found = x.gather(dim, index.to(place))
            (found * torch.arange(6.0).reshape(2, 1, 3).to(place)).sum().backward()
            gradients.append(x.grad.cpu())
        assert device.count("npu_gather_backward") == 1
    assert torch.equal(*gradients)

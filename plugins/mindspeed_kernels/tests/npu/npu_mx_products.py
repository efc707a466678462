"""Grouped products in MX formats on the value device: kernels, their exponents, and what they do not take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mindspeed_kernels.ops import checking, gmm_w4a8, npu_quant_group_gemm
from mindspeed_kernels.ops.availability import ascend_generation
from mindspeed_kernels.ops.mx_formats import E4M3, E5M2, mx_rounded, mx_rounded_groups
from mindspeed_testing.npu import value_device
from mindspeed_testing.npu.device import ValueDevice
from mindspeed_testing.npu.kernels.contract import KernelRefusal
from mindspeed_testing.npu.kernels.mx_formats import exponents_of, widened

KERNELS = ("npu_dynamic_mx_quant", "npu_grouped_dynamic_mx_quant", "npu_grouped_matmul")


@contextmanager
def device_of(soc: str) -> Iterator[ValueDevice]:
    """A value device of a generation, by which backends are chosen."""
    with value_device(soc=soc) as device, checking():
        ascend_generation.cache_clear()
        try:
            yield device
        finally:
            ascend_generation.cache_clear()


def outcome(device, counts, sizes=(70, 36), quant_format="E4M3", dtype=torch.bfloat16):
    """Product and gradients in float32 on the host."""
    torch.manual_seed(4)
    rows, (k, n) = sum(counts), sizes
    x, weight = torch.randn(rows, k).to(dtype), torch.randn(len(counts), k, n).to(dtype)
    leaves = [one.to(device).requires_grad_() for one in (x, weight)]
    y = npu_quant_group_gemm(leaves[0], leaves[1], None, list(counts), None, quant_format, False)
    y.backward(torch.randn(rows, n).to(dtype).to(device))
    return [one.detach().float().cpu() for one in (y, *(leaf.grad for leaf in leaves))]


def outcome_of_four_bits(device, counts, dtype=torch.bfloat16):
    """The same with weights of 4 bits."""
    torch.manual_seed(5)
    x, weight = torch.randn(sum(counts), 70).to(dtype), torch.randn(len(counts), 70, 36).to(dtype)
    leaves = [one.to(device).requires_grad_() for one in (x, weight)]
    ends = torch.tensor(counts).cumsum(0).to(device)
    y = gmm_w4a8.npu_gmm(*leaves, group_list=ends)
    y.backward(torch.randn(sum(counts), 36).to(dtype).to(device))
    return [one.detach().float().cpu() for one in (y, *(leaf.grad for leaf in leaves))]


def compare(*given, of=outcome, **options):
    for got, wanted in zip(of("npu", *given, **options), of("cpu", *given, **options)):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("quant_format", ["E4M3", "HYBRID"])
@pytest.mark.parametrize("counts", [(40, 0, 130, 3), (5, 64, 1)])
def test_each_product_is_rounded_and_multiplied_by_the_kernels(counts, quant_format):
    with device_of("950") as device:
        compare(counts, quant_format=quant_format)
        assert [device.count(kernel) for kernel in KERNELS] == [4, 2, 3]


@pytest.mark.parametrize(("soc", "calls"), [("950", [4, 2, 3]), ("910B", [0, 0, 0])])
def test_weights_of_four_bits_are_multiplied_by_the_kernels_where_there_are_any(soc, calls):
    with device_of(soc) as device:
        compare((40, 0, 130, 3), of=outcome_of_four_bits)
        assert [device.count(kernel) for kernel in KERNELS[:2]] == calls[:2]
        if calls[2]:
            assert device.count(KERNELS[2]) == calls[2]


@pytest.mark.parametrize("sizes", [(2, 130), (64, 2)])
def test_operands_that_are_narrow_are_told_apart_from_transposed_ones(sizes):
    with device_of("950") as device:
        compare((3, 2), sizes)
        assert device.count("npu_grouped_matmul") == 3


def test_a_single_group_is_multiplied_by_the_kernel():
    with device_of("950") as device:
        compare((70,))
        assert device.count("npu_grouped_matmul") == 3


@pytest.mark.parametrize(("counts", "sizes"), [((0, 0), (70, 36)), ((3, 2), (70, 1))])
def test_what_the_kernels_leave_unwritten_or_mistake_is_computed_without_them(counts, sizes):
    with device_of("950") as device:
        compare(counts, sizes)
        assert device.count("npu_dynamic_mx_quant") == 0


@pytest.mark.parametrize(("soc", "dtype"), [("910B", torch.bfloat16), ("950", torch.float32)])
def test_where_there_is_no_kernel_the_definition_serves(soc, dtype):
    with device_of(soc) as device:
        compare((40, 3), dtype=dtype)
        assert device.count("npu_dynamic_mx_quant") == 0


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["E4M3", "E5M2"])
def test_the_kernels_round_as_the_definition_does(form):
    import torch_npu

    torch.manual_seed(6)
    x = (torch.randn(70, 40) * torch.exp2(torch.randint(-130, 100, (70, 40)).float())).bfloat16()
    x[0, 0], x[40, 3], x[33:64, 5] = float("inf"), float("nan"), 0
    ends = torch.tensor([7, 7, 45, 70])
    with device_of("950"):
        on_device = x.to("npu")
        whole = torch_npu.npu_dynamic_mx_quant(on_device, axis=0, dst_type=form.dtype)
        y, scale = (one.cpu() for one in whole)
        found = widened(y, exponents_of(scale, 70)).float()
        torch.testing.assert_close(found, mx_rounded(x, 0, form), rtol=0, atol=0, equal_nan=True)
        parts = torch_npu.npu_grouped_dynamic_mx_quant(
            on_device, ends.int().to("npu"), dst_type=form.dtype, blocksize=32
        )
        y, scale = (one.cpu() for one in parts)
        expected, begin = mx_rounded_groups(x, ends, form), 0
        for group, end in enumerate(ends.tolist()):
            exponents = exponents_of(scale, end - begin, begin // 64 + group)
            found = widened(y[begin:end], exponents).float()
            torch.testing.assert_close(found, expected[begin:end], rtol=0, atol=0, equal_nan=True)
            begin = end
        # Of five pairs that there is room for, only three have a block.
        assert [bool((row == 255).all()) for row in scale[:, 1:]] == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dst_type": 296}, "E4M3 or E5M2"),
        ({"block_size": 64}, "block_size is 32"),
        ({"scale_alg": 1}, "scale_alg 0"),
    ],
)
def test_options_whose_contract_is_not_written_are_refused(change, message):
    import torch_npu

    given = {"axis": -1, "dst_type": torch.float8_e4m3fn, **change}
    with device_of("950"):
        x = torch.ones(2, 64, device="npu").bfloat16()
        with pytest.raises(KernelRefusal, match=message):
            torch_npu.npu_dynamic_mx_quant(x, **given)


def test_exponents_that_lie_another_way_than_their_operand_are_refused():
    import torch_npu

    with device_of("950"):
        x, weight = (torch.ones(size, device="npu").bfloat16() for size in ((4, 128), (2, 40, 128)))
        x, of_x = torch_npu.npu_dynamic_mx_quant(x, axis=-1, dst_type=torch.float8_e4m3fn)
        weight, of_weight = torch_npu.npu_dynamic_mx_quant(weight, axis=-1, dst_type=torch.float8_e4m3fn)
        options = {"group_type": 0, "split_item": 3, "output_dtype": torch.bfloat16}
        options |= dict.fromkeys(("scale_dtype", "per_token_scale_dtype"), torch_npu.float8_e8m0fnu)
        options |= {"per_token_scale": [of_x], "group_list": torch.tensor([1, 4]).to("npu")}
        turned = of_weight.transpose(1, 2)
        torch_npu.npu_grouped_matmul([x], [weight.transpose(1, 2)], scale=[turned], **options)
        with pytest.raises(KernelRefusal, match="their own options"):
            torch_npu.npu_grouped_matmul(
                [x], [weight.transpose(1, 2)], scale=[turned.contiguous()], **options
            )

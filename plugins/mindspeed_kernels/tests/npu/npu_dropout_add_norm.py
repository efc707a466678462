"""Dropout, addition and norm on the value device: dtypes that differ, generations, nothing at all."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kernels.ops import checking, npu_dropout_add_layer_norm, npu_dropout_add_rms_norm, use
from mindspeed_kernels.ops.availability import ascend_generation
from mindspeed_testing.npu import value_device

BOTH = (npu_dropout_add_layer_norm, npu_dropout_add_rms_norm)
HALF, FULL = torch.bfloat16, torch.float32


def result_and_gradients(function, dtypes, rows=3, **options):
    """The results of both, and gradients of input, residual, weight and bias, on the host."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, rows, 16), (2, rows, 16), (16,), (16,))
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes)]
    leaves = [tensor.to("npu").requires_grad_() for tensor in tensors]
    results = function(*leaves, 0.0, 1e-5, prenorm=True, **options)
    sum(item.float().square().sum() for item in results).backward()
    return [item.detach().cpu() for item in (*results, *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize(
    "dtypes",
    [(HALF, HALF, FULL, FULL), (HALF, FULL, HALF, HALF), (HALF, FULL, FULL, FULL), (FULL, HALF, HALF, HALF)],
)
@pytest.mark.parametrize("rows", [3, 0])
def test_weights_and_residuals_of_another_dtype_are_computed_by_the_kernel_with_gradients(
    function, dtypes, rows
):
    name = function.__name__
    with value_device() as device:
        with use(**{name: "npu"}):
            got = result_and_gradients(function, dtypes, rows)
        wanted = "npu_add_layer_norm" if "layer" in name else "npu_rms_norm"
        assert device.count(wanted) == bool(rows)
        with use(**{name: "reference"}):
            expected = result_and_gradients(function, dtypes, rows)
    for mine, other in zip(got, expected):
        tolerance = 2e-2 if mine.dtype == HALF else 1e-4
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def test_a_float32_residual_is_not_rounded_on_its_way_through():
    with value_device(), use(npu_dropout_add_layer_norm="npu"):
        residual = torch.full((1, 1, 16), 1.0 + 2**-12, device="npu")
        x0, weight = torch.zeros(1, 1, 16, dtype=HALF, device="npu"), torch.ones(16, dtype=HALF, device="npu")
        _, total = npu_dropout_add_layer_norm(x0, residual, weight, None, 0.0, 1e-5, prenorm=True)
        assert torch.equal(total, residual)


def test_a_generation_that_leaves_the_statistics_unwritten_is_served_by_the_reference():
    with value_device(soc="310P") as device, checking():
        ascend_generation.cache_clear()
        try:
            results = result_and_gradients(npu_dropout_add_layer_norm, (FULL,) * 4)
        finally:
            ascend_generation.cache_clear()
        assert device.count("npu_add_layer_norm") == 0
    assert not any(item.isnan().any() for item in results)

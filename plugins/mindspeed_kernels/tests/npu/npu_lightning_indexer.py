"""The indexer of sparse attention on the value device: which kernel differentiates it, and limits."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kernels.ops import checking, npu_lightning_indexer
from mindspeed_kernels.ops.availability import ascend_generation
from mindspeed_testing.npu import value_device
from mindspeed_testing.npu.kernels.contract import KernelRefusal


def operands(rows=2, keys=2050, heads=64, width=128):
    torch.manual_seed(5)
    shapes = ((1, rows, heads, width), (1, keys, 1, width), (1, rows, heads))
    return [torch.randn(shape).bfloat16() for shape in shapes]


def by_key(places, values, keys):
    """Return values in the order of keys, which does not depend on the order of almost equal ones."""
    chosen, seen = places.squeeze(2).long(), places.squeeze(2) >= 0
    table = torch.zeros(*chosen.shape[:2], keys, device=values.device)
    return table.scatter_add(-1, chosen.clamp(min=0), values.squeeze(2).float().masked_fill(~seen, 0.0))


def gradients_of(given, device, **options):
    leaves = [one.to(device).requires_grad_() for one in given]
    places, values = npu_lightning_indexer(*leaves, **options)
    table = by_key(places, values, given[1].shape[1])
    (table * torch.linspace(-1, 1, table.shape[-1], device=device)).sum().backward()
    return [table.detach().cpu(), *(leaf.grad.float().cpu() for leaf in leaves)]


def compare(given, **options):
    for got, wanted in zip(gradients_of(given, "npu", **options), gradients_of(given, "cpu", **options)):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())


@pytest.mark.parametrize("mode", [0, 3])
def test_a_kernel_differentiates_2048_of_64_heads(mode):
    given = operands(keys=2048)
    with value_device() as device:
        compare(given, sparse_mode=mode)
        assert device.count("npu_lightning_indexer_grad") == 1


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"heads": 8}, {}),
        ({"keys": 2047}, {}),
        ({"keys": 70}, {"sparse_count": 70}),
        ({"rows": 5, "keys": 3}, {"sparse_count": 2}),
    ],
)
def test_what_the_second_kernel_does_not_take_is_differentiated_without_it(sizes, options):
    with value_device() as device:
        compare(operands(**sizes), **options)
        assert device.count("npu_lightning_indexer") == 1
        assert device.count("npu_lightning_indexer_grad") == 0


def test_the_generation_without_the_second_kernel_is_differentiated_without_it():
    with value_device(soc="950") as device, checking():
        ascend_generation.cache_clear()
        try:
            compare(operands(keys=2048))
            assert device.count("npu_lightning_indexer") == 1
            assert device.count("npu_lightning_indexer_grad") == 0
        finally:
            ascend_generation.cache_clear()


@pytest.mark.parametrize(
    ("sizes", "options"), [({"width": 64}, {}), ({"heads": 65}, {}), ({}, {"sparse_count": 2049})]
)
def test_calls_beyond_the_kernel_s_limits_are_served_by_the_reference(sizes, options):
    import torch_npu

    given = operands(**{"keys": 9, **sizes})
    with value_device() as device:
        on_device = [one.to("npu") for one in given]
        with pytest.raises(KernelRefusal):
            torch_npu.npu_lightning_indexer(*on_device, return_value=True, **options)
        npu_lightning_indexer(*(one.to("npu") for one in operands(keys=9)), sparse_count=4)
        before = device.count("npu_lightning_indexer")
        places, _ = npu_lightning_indexer(*on_device, **options)
        assert int((places >= 0).sum()) == 17
        assert device.count("npu_lightning_indexer") == before


def test_without_being_asked_the_kernel_returns_no_scores():
    import torch_npu

    with value_device():
        given = [one.to("npu") for one in operands(keys=9)]
        places, values = torch_npu.npu_lightning_indexer(*given, sparse_count=4)
        assert places.shape == (1, 2, 1, 4)
        assert values.numel() == 0

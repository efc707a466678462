"""The loss of the indexer on the value device: the kernel, and what it does not take."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kernels.ops import npu_sparse_lightning_indexer_grad_kl_loss as indexer_loss
from mindspeed_testing.npu import value_device


def operands(rows=2, keys=4, heads=32, count=1024):
    torch.manual_seed(7)
    shapes = ((rows, 2, heads, 512), (keys, 2, 512), (rows, 2, 8, 128), (keys, 2, 1, 128), (rows, 2, 8))
    tensors = [torch.randn(shape).bfloat16() / 8 for shape in shapes]
    places = torch.full((2, rows, count), -1, dtype=torch.int32)
    for row in range(rows):
        seen = min(count, keys - rows + row + 1)
        places[:, row, :seen] = torch.arange(seen).flip(0)
    rope = {"query_rope": torch.randn(rows, 2, heads, 64).bfloat16() / 8}
    rope["key_rope"] = torch.randn(keys, 2, 1, 64).bfloat16() / 8
    statistics = (torch.full((2, 1, rows, heads), number) for number in (0.2, 3.0))
    return [*tensors, places, *statistics, 0.1], rope


def outcome(given, rope, device):
    placed = [one.to(device) if isinstance(one, torch.Tensor) else one for one in given]
    leaves = [one.requires_grad_() for one in placed[2:5]]
    loss = indexer_loss(*placed, **{name: one.to(device) for name, one in rope.items()})
    (3 * loss).backward()
    return [one.float().cpu() for one in (loss.detach(), *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize(("sizes", "calls"), [({}, 1), ({"heads": 8}, 0), ({"count": 3}, 0)])
def test_loss_and_scaled_gradients_are_the_definition_s(sizes, calls):
    given, rope = operands(**sizes)
    with value_device() as device:
        for got, wanted in zip(outcome(given, rope, "npu"), outcome(given, rope, "cpu")):
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-2 * wanted.abs().max().item())
        assert device.count("npu_sparse_lightning_indexer_grad_kl_loss") == calls


def test_without_ropes_the_kernel_is_not_asked():
    given, _ = operands()
    with value_device() as device:
        outcome(given, {}, "npu")
        assert device.count("npu_sparse_lightning_indexer_grad_kl_loss") == 0

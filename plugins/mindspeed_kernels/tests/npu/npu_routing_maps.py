"""Permutation by routing map on the value device: what its kernels leave out, and our branches see to."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kernels.ops import (
    BackendError,
    checking,
    npu_moe_token_permute_with_routing_map,
    npu_moe_token_unpermute_with_routing_map,
    use,
)
from mindspeed_kernels.ops.availability import ascend_generation
from mindspeed_testing.npu import value_device
from mindspeed_testing.npu.kernels.contract import KernelRefusal

MAP = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]], dtype=torch.bool)
UNEVEN = torch.tensor([[1, 1, 1], [0, 1, 0], [1, 0, 1], [1, 1, 0]], dtype=torch.bool)
NPU = {"npu_moe_token_permute_with_routing_map": "npu", "npu_moe_token_unpermute_with_routing_map": "npu"}


def test_a_map_with_rows_that_differ_is_refused_by_the_kernel_and_makes_nan_of_the_operator():
    import torch_npu

    with value_device():
        tokens, routing_map = torch.rand(4, 6, device="npu"), UNEVEN.to("npu")
        with pytest.raises(KernelRefusal, match="every row of routing_map"):
            torch_npu.npu_moe_token_permute_with_routing_map(tokens, routing_map, num_out_tokens=8)
        rows, _, where = npu_moe_token_permute_with_routing_map(tokens, routing_map, num_out_tokens=8)
        assert rows.isnan().any()
        back = npu_moe_token_unpermute_with_routing_map(
            torch.rand(8, 6, device="npu"),
            where,
            (4, 6),
            probs=torch.rand(4, 3, device="npu"),
            routing_map=routing_map,
        )
        assert back.isnan().any()


def test_the_default_number_of_the_kernel_is_not_that_of_the_operator():
    import torch_npu

    with value_device() as device:
        tokens, routing_map = torch.rand(4, 6, device="npu"), MAP.to("npu")
        with pytest.raises(KernelRefusal, match="every row"):
            torch_npu.npu_moe_token_permute_with_routing_map(tokens, routing_map)
        rows, _, _ = npu_moe_token_permute_with_routing_map(tokens, routing_map)
        assert rows.shape == (8, 6)
        assert device.count("npu_moe_token_permute_with_routing_map") == 1


def test_probabilities_in_float32_go_beside_the_kernel_without_being_rounded():
    with value_device() as device, use(**NPU):
        tokens = torch.rand(4, 6, device="npu").bfloat16()
        probs = torch.rand(4, 3, device="npu", requires_grad=True)
        rows, weights, _ = npu_moe_token_permute_with_routing_map(
            tokens, MAP.to("npu"), probs=probs, num_out_tokens=8
        )
        assert device.count("npu_moe_token_permute_with_routing_map") == 1
        assert rows.dtype == torch.bfloat16
        assert torch.equal(weights.cpu(), probs.detach().cpu().t()[MAP.t()])
        weights.sum().backward()
        assert torch.equal(probs.grad.cpu(), MAP.float())


def test_where_the_kernel_writes_nothing_the_operator_has_its_result():
    import torch_npu

    with value_device(), use(**NPU):
        none, routing_map = torch.zeros(0, 3, device="npu"), torch.zeros(4, 3, dtype=torch.bool, device="npu")
        rows, _, where = npu_moe_token_permute_with_routing_map(
            torch.rand(4, 3, device="npu"), routing_map, num_out_tokens=0
        )
        unwritten = torch_npu.npu_moe_token_unpermute_with_routing_map(rows, where, [4, 3])
        assert unwritten.isnan().all()
        rows = none.requires_grad_()
        back = npu_moe_token_unpermute_with_routing_map(rows, where, (4, 3))
        assert torch.equal(back, torch.zeros(4, 3, device="npu"))
        back.sum().backward()
        assert rows.grad.shape == (0, 3)


def test_more_copies_than_the_kernel_sorts_are_sorted_without_it_also_after_fewer():
    with value_device() as device:
        for copies in (2, 600, 2):
            tokens = torch.rand(2, 4, device="npu")
            routing_map = torch.ones(2, copies, dtype=torch.bool, device="npu")
            probs = torch.rand(2, copies, device="npu")
            given = {"probs": probs, "routing_map": routing_map}
            rows, _, where = npu_moe_token_permute_with_routing_map(
                tokens, **given, num_out_tokens=2 * copies
            )
            back = npu_moe_token_unpermute_with_routing_map(rows, where, (2, 4), **given)
            torch.testing.assert_close(back, tokens * probs.sum(1, keepdim=True))
        assert device.count("npu_moe_token_permute_with_routing_map") == 2
        assert device.count("_npu_moe_token_unpermute_with_routing_map") == 2


@pytest.mark.parametrize("soc", ["310P", "950"])
def test_generations_without_the_kernels_are_served_by_the_reference(soc):
    # Every call is judged anew: a process does not meet two generations otherwise.
    with value_device(soc=soc) as device, checking():
        ascend_generation.cache_clear()
        try:
            tokens, routing_map = torch.rand(4, 6, device="npu"), MAP.to("npu")
            rows, _, where = npu_moe_token_permute_with_routing_map(tokens, routing_map, num_out_tokens=8)
            back = npu_moe_token_unpermute_with_routing_map(rows, where, (4, 6))
            torch.testing.assert_close(back, 2 * tokens)
            assert device.count("npu_moe_token_permute_with_routing_map") == 0
            with pytest.raises(BackendError, match=f"no such kernel for Ascend {soc}"), use(**NPU):
                npu_moe_token_permute_with_routing_map(tokens, routing_map, num_out_tokens=8)
        finally:
            ascend_generation.cache_clear()

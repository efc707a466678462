"""A device with numbers: memory, aliases, random numbers and refusals of the value device."""

from __future__ import annotations

import pytest
import torch

from mindspeed_testing.npu import value_device
from mindspeed_testing.npu.kernels import all_kernels
from mindspeed_testing.npu.kernels.contract import Kernel, KernelRefusal
from mindspeed_testing.npu.soc import PRODUCTS


@pytest.fixture
def device():
    with value_device() as made:
        yield made


def test_memory_that_nobody_wrote_is_nan_or_the_largest_integer(device):
    assert torch.empty(3, device="npu").isnan().all()
    assert torch.empty_like(torch.ones(2, 2, dtype=torch.bfloat16, device="npu")).isnan().all()
    assert torch.ones(1, device="npu").new_empty(4, dtype=torch.int32).eq(2**31 - 1).all()
    assert torch.empty_strided((2, 3), (1, 2), dtype=torch.float16, device="npu").isnan().all()
    grown = torch.ones(2, device="npu").resize_(5)
    assert grown[:2].eq(1).all()
    assert grown[2:].isnan().all()


def test_a_storage_that_is_freed_and_taken_again_has_lost_its_values(device):
    flat = torch.ones(8, device="npu")
    storage = flat.untyped_storage()
    storage.resize_(0)
    storage.resize_(32)
    assert flat.isnan().all()


def test_views_and_exchanged_data_share_memory(device):
    flat = torch.zeros(8, device="npu")
    parameter = torch.nn.Parameter(torch.ones(2, 2, device="npu"))
    flat[2:6].copy_(parameter.detach().view(-1))
    parameter.data = flat[2:6].view(2, 2)
    parameter.data.add_(1)
    torch._foreach_mul_([parameter.data, flat.narrow(0, 0, 2)], 3.0)
    assert flat.tolist() == [0, 0, 6, 6, 6, 6, 0, 0]
    assert flat.as_strided((2,), (4,), 1).tolist() == [0, 6]


def test_a_module_trains_as_on_the_host(device):
    def trained(where):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
        model = model.to(where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        inputs = torch.linspace(-1, 1, 12).view(3, 4).to(where)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item(), [parameter.detach().cpu() for parameter in model.parameters()]

    (loss, parameters), (expected, others) = trained("npu"), trained("cpu")
    assert loss == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(parameters, others)


def test_random_numbers_are_the_host_s_and_come_again_with_the_state(device):
    torch.manual_seed(5)
    expected = [torch.rand(3), torch.randn(7)]
    torch.npu.manual_seed(5)
    drawn = [torch.rand(3, device="npu")]
    state = torch.npu.get_rng_state()
    drawn.append(torch.randn(7, device="npu"))
    torch.testing.assert_close([tensor.cpu() for tensor in drawn], expected, rtol=0, atol=0)
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(7, device="npu"), drawn[1])
    assert not torch.equal(torch.randn(7, device="npu"), drawn[1])


def test_dropout_draws_from_the_device_s_generator(device):
    x = torch.ones(64, device="npu", requires_grad=True)
    torch.npu.manual_seed(1)
    first = torch.nn.functional.dropout(x, 0.25)
    torch.npu.manual_seed(1)
    assert torch.equal(torch.nn.functional.dropout(x, 0.25), first)
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())


def test_tensors_of_both_sides_do_not_meet(device):
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="npu") + torch.ones(2)
    assert (torch.ones(2, device="npu") + torch.tensor(1.0)).tolist() == [2, 2]


def test_an_operation_without_kernel_names_itself(device):
    with pytest.raises(RuntimeError, match="npu::npu_sign_bits_pack has no kernel"):
        torch.ops.npu.npu_sign_bits_pack(torch.ones(8, device="npu"), 1)


def test_a_package_brings_kernels_of_its_own():
    doubled = Kernel("npu::fast_gelu", (), lambda call: call["input"] * 2, sources=())
    with value_device(kernels={doubled.operation: doubled}) as device:
        assert torch.ops.npu.fast_gelu(torch.ones(2, device="npu")).tolist() == [2, 2]
        assert device.count("fast_gelu") == 1


def test_an_operation_that_torch_npu_leaves_to_the_host_is_noted(device):
    torch.special.i0e(torch.ones(2, device="npu"))
    assert device.without_kernel["aten::special_i0e"] == 1


@pytest.mark.parametrize("soc", sorted(PRODUCTS))
def test_the_generation_answers_torch_npu_s_own_questions(soc):
    import torch_npu

    with value_device(soc=soc) as device:
        assert device.soc == soc
        assert (torch.npu.get_device_name(), torch_npu.npu.get_soc_version()) == PRODUCTS[soc]
        assert torch.npu.is_bf16_supported() == (soc != "310P")


def test_a_generation_without_the_kernel_refuses_the_call():
    x, angle = (torch.ones(1, 2, 3, 8) for _ in range(2))
    with value_device(soc="310P"):
        import torch_npu

        with pytest.raises(KernelRefusal, match="not on Ascend 310P"):
            torch_npu.npu_rotary_mul(*(tensor.to("npu") for tensor in (x, angle, angle)))


def test_every_contract_names_its_sources():
    assert all(kernel.operation.count("::") == 1 for kernel in all_kernels().values())
    assert [k.operation for k in all_kernels().values() if any(not s.commit for s in k.sources)] == []

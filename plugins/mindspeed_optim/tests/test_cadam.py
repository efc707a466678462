"""CAdam by itself: its arithmetic, the form of its state, and what it takes from Adam."""

import pytest
import torch

from mindspeed_megatron.parameter_parts import ParameterPart, ParameterParts
from mindspeed_optim.float_blocks import BLOCK
from mindspeed_optim.rules.cadam import CAdam

RATE, DECAY, BETA = 0.01, 0.1, 0.75


def groups(*parameters):
    return [
        {"params": list(parameters), "lr": RATE, "weight_decay": DECAY, "betas": (BETA, 0.999), "eps": 1e-8}
    ]


def gradients(size, steps=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(size, generator=generator).mul(12).sub(9)
    return [torch.randn(size, generator=generator) * 10.0**scales for _ in range(steps)]


def trained(optimizer, given):
    (parameter,) = optimizer.param_groups[0]["params"]
    for gradient in given:
        parameter.grad = gradient.view_as(parameter)
        optimizer.step()
    return parameter.detach().clone()


def part(size, start):
    return ParameterPart(None, "", start, start + size, torch.Size([start + size]))


def sharded(parameter, start):
    optimizer = CAdam(groups(parameter))
    optimizer.parts = ParameterParts({parameter: part(parameter.numel(), start)})
    return optimizer


def test_it_moves_by_the_sign_of_the_average_gradient():
    start, given = torch.randn(300, generator=torch.Generator().manual_seed(1)), gradients(300)
    expected, moment = start.double(), torch.zeros(300, dtype=torch.float64)
    for gradient in given:
        expected = expected * (1 - RATE * DECAY)
        moment = BETA * moment + (1 - BETA) * gradient.double()
        expected = expected - RATE * moment.sign()
    found = trained(CAdam(groups(torch.nn.Parameter(start.clone()))), given)
    off = (found.double() - expected).abs() > 1e-5
    # Where a moment is near zero beside others of its block, 16 bits may turn its sign.
    assert int(off.sum()) <= 3


def test_a_number_without_gradient_stays():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = CAdam(groups(parameter))
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert trained(optimizer, [torch.tensor([0.0, 1e-20, -1e-20, 0.0])]).tolist() == pytest.approx(
        [1.0, 1 - RATE, 1 + RATE, 1.0]
    )


def test_two_parts_are_updated_as_the_whole_but_for_the_block_that_both_have():
    size, cut = 1000, 437
    whole = torch.randn(size, generator=torch.Generator().manual_seed(1))
    given = gradients(size)
    expected = trained(CAdam(groups(torch.nn.Parameter(whole.clone()))), given)
    found = [
        trained(sharded(torch.nn.Parameter(whole[a:b].clone()), a), [gradient[a:b] for gradient in given])
        for a, b in ((0, cut), (cut, size))
    ]
    differing = (torch.cat(found) != expected).nonzero().view(-1) // BLOCK
    assert set(differing.tolist()) <= {cut // BLOCK}


def test_a_matrix_cut_by_rows_is_updated_like_its_flat_range():
    start, given = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)), gradients(300)
    flat = trained(CAdam(groups(torch.nn.Parameter(start.view(-1).clone()))), given)
    assert torch.equal(trained(CAdam(groups(torch.nn.Parameter(start.clone()))), given), flat.view(6, 50))


def test_it_goes_on_from_its_state_bit_for_bit():
    given = gradients(300, steps=8)
    optimizer = sharded(torch.nn.Parameter(torch.zeros(300)), 77)
    trained(optimizer, given[:4])
    (parameter,) = optimizer.param_groups[0]["params"]
    saved = optimizer.state_dict()
    other = sharded(torch.nn.Parameter(parameter.detach().clone()), 77)
    other.load_state_dict(saved)
    assert other.state_dict()["state"][0]["exp_avg"].equal(saved["state"][0]["exp_avg"])
    assert torch.equal(trained(other, given[4:]), trained(optimizer, given[4:]))


def test_it_takes_the_first_moment_of_adam():
    parameter = torch.nn.Parameter(torch.zeros(300))
    adam = torch.optim.AdamW([parameter], betas=(0.5, 0.5))
    parameter.grad = gradients(300)[0].bfloat16().float()
    adam.step()
    optimizer = CAdam(groups(torch.nn.Parameter(torch.zeros(300))))
    optimizer.load_state_dict(adam.state_dict())
    found = optimizer.state_dict()["state"][0]
    torch.testing.assert_close(found["exp_avg"], parameter.grad / 2, rtol=2**-11, atol=1e-8)
    assert not found["exp_avg_sq"].any()
    assert optimizer.param_groups[0]["step"] == 1


def test_it_keeps_two_bytes_for_a_number_and_one_for_a_block():
    optimizer = sharded(torch.nn.Parameter(torch.zeros(10_007)), 5_003)
    optimizer.allocate()
    ((kept,),) = (state.values() for state in optimizer.state.values())
    found = sum(tensor.numel() * tensor.element_size() for tensor in (kept.numbers, kept.exponents))
    assert 0 <= found - 10_007 * (2 + 1 / BLOCK) <= 2

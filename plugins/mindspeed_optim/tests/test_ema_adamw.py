"""Averaged weights by themselves: their formula, their count, and where they begin."""

import pytest
import torch

from mindspeed_optim.rules.ema_adamw import EMA, UPDATES, EmaAdamW

DECAY = 0.5


def groups(*parameters):
    return [{"params": [*parameters], "lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}]


def gradients(steps, size=64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for _ in range(steps)]


def trained(optimizer, given):
    (parameter,) = optimizer.param_groups[0]["params"]
    seen = []
    for gradient in given:
        parameter.grad = gradient
        optimizer.step()
        seen.append(parameter.detach().clone())
    return seen


def average(optimizer):
    (parameter,) = optimizer.param_groups[0]["params"]
    return optimizer.described(parameter)[EMA]


def expected(start, seen, decay, count=0):
    found = start.double()
    for number, parameter in enumerate(seen, count + 1):
        factor = min(decay, (1 + number) / (10 + number))
        found = factor * found + (1 - factor) * parameter.double()
    return found


@pytest.mark.parametrize("decay", [0.0, DECAY, 0.9999, 1.0])
def test_the_average_is_that_of_double_precision(decay):
    start = torch.ones(64)
    optimizer = EmaAdamW(groups(torch.nn.Parameter(start.clone())), decay)
    seen = trained(optimizer, gradients(20))
    torch.testing.assert_close(
        average(optimizer).double(), expected(start, seen, decay), rtol=1e-6, atol=1e-6
    )
    assert optimizer.param_groups[0][UPDATES] == 20


def test_parameters_are_those_of_the_fused_kernel():
    one, other = torch.nn.Parameter(torch.ones(64)), torch.nn.Parameter(torch.ones(64))
    fused = torch.optim.AdamW(groups(other), fused=True)
    seen = trained(EmaAdamW(groups(one), DECAY), gradients(5))
    assert torch.equal(seen[-1], trained(fused, gradients(5))[-1])


def test_it_goes_on_with_its_count():
    given = gradients(8)
    optimizer = EmaAdamW(groups(torch.nn.Parameter(torch.ones(64))), DECAY)
    seen = trained(optimizer, given[:3])
    other = EmaAdamW(groups(torch.nn.Parameter(seen[-1].clone())), DECAY)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0][UPDATES] == 3
    for one in (optimizer, other):
        trained(one, given[3:])
    assert torch.equal(average(other), average(optimizer))


def test_after_adam_it_begins_with_the_parameter_and_counts_from_zero():
    weight = torch.nn.Parameter(torch.ones(64))
    adam = torch.optim.AdamW(groups(weight))
    start = trained(adam, gradients(4))[-1]
    # The weights of the checkpoint arrive after the state is made.
    parameter = torch.nn.Parameter(torch.zeros(64))
    optimizer = EmaAdamW(groups(parameter), DECAY)
    optimizer.load_state_dict(adam.state_dict())
    with torch.no_grad():
        parameter.copy_(start)
    assert optimizer.param_groups[0]["step"] == 4
    assert optimizer.param_groups[0][UPDATES] == 0
    seen = trained(optimizer, gradients(2))
    torch.testing.assert_close(
        average(optimizer).double(), expected(start, seen, DECAY), rtol=1e-6, atol=1e-6
    )


def test_another_decay_on_resume_is_the_runs():
    optimizer = EmaAdamW(groups(torch.nn.Parameter(torch.ones(64))), DECAY)
    trained(optimizer, gradients(1))
    other = EmaAdamW(groups(torch.nn.Parameter(torch.ones(64))), 0.25)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["ema_decay"] == 0.25

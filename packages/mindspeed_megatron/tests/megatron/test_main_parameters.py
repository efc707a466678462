"""Update rules that keep main parameters: gradients as they are, their norm, their factors."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_megatron import main_parameters
from mindspeed_megatron.main_parameters import MainParameterOptimizer


class Rule(MainParameterOptimizer):
    def new_state(self, parameter):
        return {}

    def update(self, parameter, gradient, state, group):
        parameter.sub_(gradient)

    def main_parameter(self, parameter):
        return parameter.float()

    def take_main_parameter(self, parameter, value):
        parameter.copy_(value)

    def forget_main_parameter(self, parameter):
        self.forgotten = [*getattr(self, "forgotten", []), parameter]


def rule(*parameters):
    return Rule([{"params": list(parameters), "lr": 1.0}])


def test_a_gradient_is_multiplied_in_float32_and_left_as_it_is():
    optimizer, gradient = rule(), torch.full((3,), 1.0078125).bfloat16()
    optimizer.inverse_scale, optimizer.clip_factor = torch.tensor(0.25), 1 / 3
    expected = gradient.float() * torch.tensor(0.25) * (1 / 3)
    assert torch.equal(optimizer.float32_gradient(gradient), expected)
    assert torch.equal(gradient, torch.full((3,), 1.0078125).bfloat16())
    whole = torch.ones(3)
    assert torch.equal(optimizer.float32_gradient(whole), whole * torch.tensor(0.25) * (1 / 3))
    assert torch.equal(whole, torch.ones(3))


@pytest.mark.parametrize("size", [1, 17, 1000, 33_333])
def test_norms_are_those_of_float32_copies(size):
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0)).bfloat16()
    part = SimpleNamespace(optimizer=rule(), get_main_grads_for_grad_norm=lambda: [gradient])
    (found,) = main_parameters._norms(part)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.norm(gradient.float()))


def bf16_part():
    """State that megatron-core keeps of two parameters of 16 bits and one of 32."""
    small, large, plain = torch.zeros(2).bfloat16(), torch.zeros(3).bfloat16(), torch.zeros(4)
    copies = [small.float(), large.float()]
    small.main_param, large.main_param = copies
    groups = [{"params": [copies[0], plain, copies[1]]}]
    part = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=groups),
        float16_groups=[[small, large]],
        fp32_from_float16_groups=[copies],
    )
    return part, (small, plain, large), list(copies)


def test_copies_are_handed_over_and_whoever_reads_their_places_fails():
    part, (small, plain, large), copies = bf16_part()
    found = main_parameters.hand_over(part)
    held = part.optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(held, (small, plain, large)))
    assert all(a is b and c is d for (a, c), (b, d) in zip(found, zip((small, large), copies)))
    assert not hasattr(small, "main_param")
    (left,) = part.fp32_from_float16_groups
    assert [place.shape for place in left] == [(2,), (3,)]
    with pytest.raises((NotImplementedError, RuntimeError)):
        left[0].tolist()


def test_clipping_is_left_to_the_next_step():
    optimizer = rule()
    assert main_parameters._clip(lambda: 4.0, [optimizer], 1.0) == 4.0
    assert optimizer.clip_factor == 1.0 / (4.0 + 1.0e-6)
    main_parameters._clip(lambda: 0.5, [optimizer], 1.0)
    assert optimizer.clip_factor is None
    main_parameters._clip(lambda: 4.0, [optimizer], 0.0)
    assert optimizer.clip_factor is None
    main_parameters._clip(lambda: float("nan"), [optimizer], 1.0)
    assert optimizer.clip_factor is None


def test_weights_from_outside_are_where_it_goes_on():
    first, second = torch.zeros(1), torch.zeros(2)
    optimizer = rule(first, second)
    main_parameters._forget(None, optimizer)
    assert [parameter.numel() for parameter in optimizer.forgotten] == [1, 2]

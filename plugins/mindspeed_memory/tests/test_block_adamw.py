"""The block-wise AdamW by itself: numbers of torch's AdamW, bytes of windows, overwritten weights."""

import pytest
import torch

from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_megatron.instruments.memory import TensorBytes
from mindspeed_memory.optim.block_adamw import BlockAdamW
from mindspeed_memory.optim.options import SIGN, SPLIT, BlockOptions
from mindspeed_memory.optim.places import Budget, Compressor, Device, Host
from mindspeed_memory.optim.split_master import HALF_UP

SIZES = ((300, 30), (7,), (128,), (1,), (1000,))
SPLIT_LIST, SPLIT_SIGN = BlockOptions(SPLIT), BlockOptions(SPLIT, ties=SIGN)
PLATFORM = CpuPlatform()
FORMS = {
    "whole": lambda: (BlockOptions(), Device(PLATFORM)),
    "split": lambda: (SPLIT_LIST, Device(PLATFORM, block=64)),
    "split, signs": lambda: (SPLIT_SIGN, Device(PLATFORM, block=64)),
    "one window": lambda: (BlockOptions(), Host(PLATFORM, 1)),
    "two windows": lambda: (BlockOptions(), Host(PLATFORM, 2)),
    "three windows": lambda: (BlockOptions(), Host(PLATFORM, 3)),
    "sixteen windows": lambda: (BlockOptions(), Host(PLATFORM, 16)),
    "copied back later": lambda: (BlockOptions(), Host(PLATFORM, 0)),
    "a budget": lambda: (BlockOptions(), Budget(PLATFORM, 40_000)),
    "a budget, split": lambda: (SPLIT_SIGN, Budget(PLATFORM, 40_000)),
    "compressed": lambda: (BlockOptions(), Compressor(PLATFORM)),
    "compressed, split": lambda: (SPLIT_SIGN, Compressor(PLATFORM)),
}


def groups(parameters):
    common = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}
    return [
        {"params": parameters[::2], "weight_decay": 0.1, **common},
        {"params": parameters[1::2], "weight_decay": 0.0, **common},
    ]


def started(seed=0, mixed=False):
    """Weights of 16 bits, the second one of 32 where they are mixed."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(size, generator=generator).bfloat16() for size in SIZES]
    if mixed:
        found[1] = found[1].float()
    return found


class Reference:
    """Reference: megatron-core with torch's AdamW."""

    def __init__(self, weights, kind=torch.optim.AdamW):
        self.weights = weights
        self.mains = [weight.float().clone() for weight in weights]
        self.adam = kind(groups(self.mains))

    def step(self, gradients, factor=None):
        for main, gradient in zip(self.mains, gradients):
            main.grad = gradient.float() if factor is None else gradient.float() * factor
        self.adam.step()
        for weight, main in zip(self.weights, self.mains):
            weight.copy_(main)

    def moments(self, index):
        state = self.adam.state[self.mains[index]]
        return state["exp_avg"], state["exp_avg_sq"]


def gradients(step, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(100 + step)
    # Rows without a gradient keep a second moment of zero.
    found = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    found[0][:100] = 0
    return found


def block(weights, options, place, **more):
    return BlockAdamW(groups(weights), options, place, **more)


def stepped(optimizer, weights, found, factor=None):
    for weight, gradient in zip(weights, found):
        weight.decoupled_grad = gradient
    optimizer.clip_factor = factor
    optimizer.step()


def assert_equal(optimizer, weights, reference):
    for index, weight in enumerate(weights):
        assert torch.equal(weight, reference.weights[index])
        assert torch.equal(optimizer.main_parameter(weight), reference.mains[index])
        described = optimizer.described(weight)
        for name, moment in zip(("exp_avg", "exp_avg_sq"), reference.moments(index)):
            assert torch.equal(described[name], moment)


@pytest.mark.parametrize("mixed", [False, True], ids=["16 bits", "mixed"])
@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_those_of_adamw(form, mixed):
    reference, weights = Reference(started(mixed=mixed)), started(mixed=mixed)
    optimizer = block(weights, *FORMS[form]())
    for step in range(4):
        factor = 0.37 if step % 2 else None
        reference.step(gradients(step), factor)
        stepped(optimizer, weights, gradients(step), factor)
        assert_equal(optimizer, weights, reference)


def test_weight_decay_may_be_added_to_the_gradient_as_in_adam():
    reference, weights = Reference(started(), torch.optim.Adam), started()
    optimizer = block(weights, SPLIT_LIST, Device(PLATFORM), decoupled=False)
    for step in range(3):
        reference.step(gradients(step))
        stepped(optimizer, weights, gradients(step))
    assert_equal(optimizer, weights, reference)


def test_gradients_stay_as_they_are():
    weights, found = started(), gradients(0, torch.float32)
    kept = [gradient.clone() for gradient in found]
    stepped(block(weights, *FORMS["whole"]()), weights, found, factor=0.5)
    assert all(torch.equal(one, other) for one, other in zip(found, kept))


@pytest.mark.parametrize("form", FORMS)
def test_state_goes_to_adamw_and_comes_back_under_another_form(form):
    reference, weights = Reference(started()), started()
    first = block(weights, *FORMS["split"]())
    for step in range(2):
        reference.step(gradients(step))
        stepped(first, weights, gradients(step))
    others = [weight.clone() for weight in weights]
    second = block(others, *FORMS[form]())
    second.load_state_dict(first.state_dict())
    for weight, other in zip(weights, others):
        second.take_main_parameter(other, first.main_parameter(weight))
    assert_equal(second, others, reference)
    reference.step(gradients(2))
    stepped(second, others, gradients(2))
    assert_equal(second, others, reference)


@pytest.mark.parametrize("form", FORMS)
def test_state_is_read_without_code_of_others(form, tmp_path):
    weights = started()
    optimizer = block(weights, *FORMS[form]())
    stepped(optimizer, weights, gradients(0))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert found.keys() == {"state", "param_groups"}


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_were_overwritten_from_outside_are_where_it_goes_on(form):
    weights, reference = started(), Reference(started())
    optimizer = block(weights, *FORMS[form]())
    reference.step(gradients(0))
    stepped(optimizer, weights, gradients(0))
    for index, value in enumerate(started(seed=1)):
        for weight in (weights[index], reference.weights[index]):
            weight.copy_(value)
        reference.mains[index].copy_(value)
        optimizer.forget_main_parameter(weights[index])
    assert_equal(optimizer, weights, reference)
    reference.step(gradients(1))
    stepped(optimizer, weights, gradients(1))
    assert_equal(optimizer, weights, reference)


@pytest.mark.parametrize("rounding", ["rne", HALF_UP])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(rounding, value):
    weights = started()
    optimizer = block(weights, BlockOptions(SPLIT, rounding), Device(PLATFORM))
    found = gradients(0)
    found[0][0, 0] = value
    for _ in range(3):
        stepped(optimizer, weights, found)
        found = gradients(1)
        assert not weights[0][0, 0].isfinite()
        assert weights[0][0, 1:].isfinite().all()


def test_residuals_and_ties_are_all_that_is_kept_of_main_parameters():
    weights = started()
    optimizer = block(weights, SPLIT_LIST, Device(PLATFORM))
    for step in range(4):
        stepped(optimizer, weights, gradients(step))
    for weight in weights:
        state = optimizer.state[weight]
        assert state["residual"].dtype == torch.int16
        assert state["ties"].numel() <= 1e-3 * weight.numel() + 1
        assert state.keys() == {"exp_avg", "exp_avg_sq", "residual", "ties"}


@pytest.mark.parametrize("times", [2, 3, 16])
def test_windows_take_what_the_formula_says(times):
    weights = [torch.zeros(160_000).bfloat16()]
    optimizer = BlockAdamW(groups(weights)[:1], BlockOptions(), Host(PLATFORM, times))
    weights[0].decoupled_grad = torch.ones(160_000).bfloat16()
    optimizer.step()
    with TensorBytes() as tracker:
        optimizer.step()
    window = -(-160_000 // times)
    assert 24 * window < tracker.peak <= 32 * window + 1024
    assert tracker.alive == 0


def test_no_float32_copy_of_gradients_is_made():
    weights = [torch.zeros(160_000).bfloat16()]
    optimizer = BlockAdamW(groups(weights)[:1], BlockOptions(), Device(PLATFORM))
    weights[0].decoupled_grad = torch.ones(160_000).bfloat16()
    optimizer.step()
    with TensorBytes() as tracker:
        optimizer.step()
    # One window: its gradient, and what AdamW makes for it.
    assert tracker.peak <= 12 * 10_000 + 1024


def test_no_host_buffer_is_made_after_the_first_step():
    made = []

    class Counting(CpuPlatform):
        def pinned_empty(self, shape, dtype):
            made.append(shape)
            return super().pinned_empty(shape, dtype)

    weights = started()
    optimizer = block(weights, BlockOptions(), Host(Counting(), 4))
    stepped(optimizer, weights, gradients(0))
    first = len(made)
    stepped(optimizer, weights, gradients(1))
    assert first == len(made) == 3 * len(weights)


def test_a_budget_is_used_tensor_by_tensor():
    weights, methods = started(), dict(vars(torch.Tensor))
    optimizer = block(weights, BlockOptions(), Budget(PLATFORM, 4 * 9_000 + 4 * 1_000))
    stepped(optimizer, weights, gradients(0))
    on_host = {
        (index, name)
        for index, weight in enumerate(weights)
        for name, kept in optimizer.state[weight].items()
        if getattr(kept, "on_host", False)
    }
    assert (0, "exp_avg") in on_host
    assert (0, "exp_avg_sq") not in on_host
    assert (4, "main") not in on_host
    assert optimizer.place.left < 4 * 1_000
    assert dict(vars(torch.Tensor)) == methods

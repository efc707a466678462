"""Moments of 8 and 16 bits inside the block-wise AdamW: no stall, and no window or shard changes them."""

import pytest
import torch

from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_megatron.parameter_parts import ParameterPart, ParameterParts
from mindspeed_memory.optim.block_adamw import BlockAdamW
from mindspeed_memory.optim.options import SPLIT, BlockOptions
from mindspeed_optim.float_blocks import BLOCK
from mindspeed_optim.quantized_formats import BF16, FP8
from mindspeed_optim.quantized_moments import QuantizedMoments

PLATFORM = CpuPlatform()
FORMATS = pytest.mark.parametrize("form", [FP8, BF16])
SIZE = 3000


def place(form, block=2**24):
    found = QuantizedMoments(PLATFORM, form)
    found.block = block
    return found


def groups(*parameters):
    return [{"params": [*parameters], "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}]


def weights(size=SIZE, dtype=torch.bfloat16):
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)


def gradients(step, size=SIZE):
    generator = torch.Generator().manual_seed(100 + step)
    # Every 50 numbers of another size; the first ones have no gradient.
    scales = torch.rand(size // 50, generator=torch.Generator().manual_seed(2)).mul(8).sub(6)
    found = torch.randn(size, generator=generator) * (10.0**scales).repeat_interleave(50)
    found[:40] = 0
    return found.bfloat16()


def trained(weight, form, steps=5, start=0, block=2**24, options=None):
    optimizer = BlockAdamW(groups(weight), options or BlockOptions(), place(form, block))
    part = ParameterPart(None, "", start, start + weight.numel(), torch.Size([start + weight.numel()]))
    optimizer.parts = ParameterParts({weight: part})
    for step in range(steps):
        weight.decoupled_grad = gradients(step)[start : start + weight.numel()]
        optimizer.step()
    return optimizer


def described(optimizer, weight):
    found = optimizer.described(weight)
    return torch.stack([optimizer.main_parameter(weight), found["exp_avg"], found["exp_avg_sq"]])


@FORMATS
def test_windows_change_nothing(form):
    one, other = weights(), weights()
    whole = described(trained(one, form), one)
    assert torch.equal(described(trained(other, form, block=BLOCK), other), whole)


@FORMATS
def test_split_main_parameters_change_nothing(form):
    one, other = weights(), weights()
    whole = described(trained(one, form), one)
    assert torch.equal(described(trained(other, form, options=BlockOptions(SPLIT)), other), whole)


@FORMATS
def test_two_parts_are_updated_as_the_whole_but_for_the_block_that_both_have(form):
    cut, one = 1337, weights()
    whole = described(trained(one, form), one)
    found = []
    for start, stop in ((0, cut), (cut, SIZE)):
        own = weights()[start:stop].clone()
        found.append(described(trained(own, form, start=start, block=BLOCK), own))
    differing = (torch.cat(found, 1) != whole).any(0).nonzero().view(-1) // BLOCK
    assert set(differing.tolist()) <= ({cut // BLOCK} if form == FP8 else set())


@FORMATS
def test_its_state_comes_back_exactly(form):
    one = weights()
    optimizer = trained(one, form)
    own = described(optimizer, one)
    other = one.clone()
    again = trained(other, form, steps=0)
    again.take(other, optimizer.described(one))
    again.take_main_parameter(other, optimizer.main_parameter(one))
    assert torch.equal(described(again, other), own)


@pytest.mark.parametrize(("form", "bound"), [(FP8, 0.25), (BF16, 0.02)])
def test_moments_are_those_of_adam_but_for_their_rounding(form, bound):
    one = weights()
    found = trained(one, form).described(one)
    main = weights().float()
    adam = torch.optim.AdamW(groups(main))
    for step in range(5):
        main.grad = gradients(step).float()
        adam.step()
    expected = adam.state[main]["exp_avg_sq"]
    error = (found["exp_avg_sq"] - expected).abs() / expected.clamp_min(1e-30)
    assert float(error.median()) < bound
    assert torch.equal(found["exp_avg_sq"] > 0, expected > 0)


@FORMATS
def test_a_second_moment_does_not_stop_on_its_way(form):
    size, exact = 1024, torch.zeros(1024)
    kept = place(form).zeros("exp_avg_sq", size, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 601):
        square = torch.randn(size, generator=generator).square()
        exact.lerp_(square, 0.001)
        kept.give(0, size, kept.take(0, size).lerp_(square, 0.001), step)
    # Rounded to nearest, updates through 8 bits are twice as large by now, and grow.
    assert float((exact / kept.whole()).sqrt().mean()) == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize(("form", "bytes_per_number", "blocks"), [(FP8, 2, 2), (BF16, 4, 0)])
def test_it_keeps_what_it_says(form, bytes_per_number, blocks):
    weight = torch.zeros(10_007)
    optimizer = trained(weight, form, steps=0, start=5_003)
    optimizer.allocate()
    kept = optimizer.state[weight]
    tensors = [t for moment in kept.values() for t in (moment if form == BF16 else moment.kept)]
    found = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
    assert 0 <= found - 10_007 * (bytes_per_number + blocks / BLOCK) <= 4

"""Compressed float32 numbers: every bit pattern comes back, and how many bytes they take."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_memory.exponent_blocks import BLOCK
from mindspeed_memory.optim.exponent_codec import decode, encode


def coded(numbers):
    encoded = encode(numbers)
    found = torch.empty_like(numbers)
    decode(encoded, found)
    assert torch.equal(found.view(torch.int32), numbers.view(torch.int32))
    return encoded.numel() / (4 * numbers.numel())


def random(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_every_upper_half_comes_back_in_order_and_shuffled():
    every = (torch.arange(2**16) << 16).to(torch.int32).view(torch.float32)
    shuffled = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    assert coded(every) < coded(shuffled) <= 1 + 3 / 512


def test_any_bit_pattern_comes_back():
    patterns = torch.randint(-(2**31), 2**31 - 1, (2**16,), generator=torch.Generator().manual_seed(1))
    assert coded(patterns.to(torch.int32).view(torch.float32)) <= 1 + 3 / 512


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3 * BLOCK))
def test_any_length_of_any_patterns_comes_back(patterns):
    signed = [pattern - 2**32 if pattern >= 2**31 else pattern for pattern in patterns]
    coded(torch.tensor(signed, dtype=torch.int32).view(torch.float32))


@pytest.mark.parametrize(
    ("numbers", "most"),
    [
        (random(2**16), 0.88),
        (random(2**16) ** 2 * 1e-6, 0.905),
        (torch.zeros(2**16), 0.76),
        (torch.where(random(2**16, 1) > 0, random(2**16), 0.0), 0.88),
    ],
    ids=["normal", "squares", "zeros", "half zeros"],
)
def test_ordinary_numbers_become_smaller(numbers, most):
    assert coded(numbers) <= most

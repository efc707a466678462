"""A float32 number as a weight and 16 further bits: every boundary, both roundings."""

import pytest
import torch

from mindspeed_memory.optim.split_master import HALF_UP, RNE, join, split, unsplit

CRITICAL = (0x0000, 0x0001, 0x007F, 0x0080, 0x0081, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7FFF)
"""Upper halves: zero, denormals and normals at their borders, about one, largest, infinity, a NaN."""


def numbers():
    """All upper halves at the borders of their lower halves, and critical ones with every lower half."""
    lows = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF])
    highs = torch.arange(2**16)
    borders = (highs.view(-1, 1) << 16 | lows).view(-1)
    critical = torch.tensor([*CRITICAL, *(high | 0x8000 for high in CRITICAL)])
    exhaustive = (critical.view(-1, 1) << 16 | torch.arange(2**16)).view(-1)
    return torch.cat((borders, exhaustive)).to(torch.int32).view(torch.float32)


def split_and_joined(main, rounding):
    weight = torch.empty(main.numel(), dtype=torch.bfloat16)
    residual = torch.empty(main.numel(), dtype=torch.int16)
    ties = split(main.clone(), weight, residual, rounding)
    return weight, ties, join(weight, residual, rounding, ties)


def bits(numbers):
    return numbers.view(torch.int32 if numbers.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("rounding", [RNE, HALF_UP])
def test_every_number_comes_back_and_a_nan_stays_one(rounding):
    main = numbers()
    _, _, found = split_and_joined(main, rounding)
    ordinary = ~main.isnan()
    assert torch.equal(bits(found)[ordinary], bits(main)[ordinary])
    assert found[~ordinary].isnan().all()


def test_weights_are_those_of_a_cast():
    main = numbers()
    weight, ties, _ = split_and_joined(main, RNE)
    assert torch.equal(bits(weight), bits(main.to(torch.bfloat16)))
    assert ties.any()


def test_a_nan_gives_a_weight_that_is_none():
    main = numbers()
    assert torch.equal(split_and_joined(main, HALF_UP)[0].isnan(), main.isnan())


def test_half_up_rounds_other_than_a_cast_at_ties_with_an_even_upper_half_only():
    main = numbers()
    main = main[~main.isnan()]
    weight, ties, _ = split_and_joined(main, HALF_UP)
    assert ties is None
    differs = bits(weight) != bits(main.to(torch.bfloat16))
    even_tie = (bits(main) & 0x1FFFF) == 0x8000
    assert torch.equal(differs, even_tie)


def test_ties_are_joined_by_index_as_by_mask():
    main = numbers()
    weight = torch.empty(main.numel(), dtype=torch.bfloat16)
    residual = torch.empty(main.numel(), dtype=torch.int16)
    ties = split(main, weight, residual, RNE)
    by_index = join(weight, residual, RNE, ties.nonzero().view(-1))
    assert torch.equal(bits(by_index), bits(join(weight, residual, RNE, ties)))


@pytest.mark.parametrize("rounding", [RNE, HALF_UP])
def test_without_residuals_numbers_are_those_of_the_weights(rounding):
    weight = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    weight = weight[~weight.isnan()]
    residual = torch.empty(weight.numel(), dtype=torch.int16)
    unsplit(residual, rounding)
    assert torch.equal(bits(join(weight, residual, rounding)), bits(weight.float()))

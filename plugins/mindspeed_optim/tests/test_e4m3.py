"""Codes of 8 bits: torch's format, nearest or stochastic rounding."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_core import ParameterPart
from mindspeed_optim.e4m3 import LARGEST, from_e4m3, to_e4m3
from mindspeed_optim.stochastic_rounding import Place, key_of, random_bits, rounded_to_bfloat16

CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
IN_RANGE = st.floats(-LARGEST, LARGEST, width=32)


def bits(count, step=1):
    return random_bits(key_of(step, 0), torch.arange(count))


def test_codes_are_those_of_torch():
    torch.testing.assert_close(
        from_e4m3(CODES), CODES.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True
    )


def test_every_code_comes_back_however_it_is_rounded():
    values = from_e4m3(CODES)
    assert torch.equal(to_e4m3(values), CODES)
    assert torch.equal(to_e4m3(values, bits(256)), CODES)


@settings(deadline=None, max_examples=40)
@given(st.lists(IN_RANGE, min_size=1, max_size=50))
def test_rounding_to_nearest_is_torchs_cast(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(to_e4m3(tensor), tensor.to(torch.float8_e4m3fn).view(torch.uint8))


@settings(deadline=None, max_examples=40)
@given(st.floats(2.0**-10, LARGEST, width=32), st.integers(1, 1000))
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(value, step):
    count = 4096
    found = from_e4m3(to_e4m3(torch.full((count,), value), bits(count, step)))
    neighbours = found.unique()
    assert neighbours.numel() <= 2
    assert neighbours[0] <= value <= neighbours[-1] or neighbours.numel() == 1
    apart = float(neighbours[-1] - neighbours[0])
    assert abs(float(found.double().mean()) - value) <= 0.05 * apart + 1e-3 * value


def test_what_is_not_finite_stays_so():
    given = torch.tensor([float("nan"), float("inf"), float("-inf")])
    for noise in (None, bits(3)):
        assert from_e4m3(to_e4m3(given, noise)).isnan().all()
    found = rounded_to_bfloat16(given, bits(3))
    assert found.isnan().tolist() == [True, False, False]
    assert found[1:].tolist() == [float("inf"), float("-inf")]


def test_numbers_of_bfloat16_stay_and_others_are_right_on_average():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    exact = values.bfloat16().float()
    assert torch.equal(rounded_to_bfloat16(exact, bits(4096)), exact)
    rounded = rounded_to_bfloat16(values, bits(4096))
    assert torch.equal(rounded.bfloat16().float(), rounded)
    assert abs(float(((rounded - values) / values.abs()).mean())) < 2e-4


def test_random_bits_are_those_of_a_place_in_a_step():
    whole = bits(1000, step=7)
    part = random_bits(key_of(7, 0), Place(290).elements(10, 110, torch.device("cpu")))
    assert torch.equal(part, whole[300:400])
    for other in (bits(1000, step=8), random_bits(key_of(7, 1), torch.arange(1000))):
        assert int((other == whole).sum()) <= 1


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_places_are_those_of_the_parameter_that_tensor_parallel_ranks_cut(dim):
    whole = torch.arange(4 * 6 * 10).view(4, 6, 10)
    for rank, own in enumerate(whole.chunk(2, dim)):
        group = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        part = ParameterPart(None, "", 17, own.numel(), own.shape, dim, group)
        found = Place.of(part).elements(3, own.numel() - 17, torch.device("cpu"))
        assert torch.equal(found, own.flatten()[20:])


def test_random_bits_are_even():
    found = random_bits(key_of(3, 1), torch.arange(2**32 - 500, 2**32 + 100_000))
    for bit in range(32):
        assert abs(float(((found >> bit) & 1).double().mean()) - 0.5) < 0.01

"""Blocks that share a power of two: exact where they are read again, alike in every part of a parameter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_optim.float_blocks import BLOCK, E4M3, E4M3_ROOT, FLOAT16, BlockFloats, block_ranges

CPU = torch.device("cpu")
FORMS = pytest.mark.parametrize("form", [FLOAT16, E4M3, E4M3_ROOT], ids=["float16", "e4m3", "root"])
SIZES, STARTS, SEEDS = st.integers(1, 700), st.integers(0, 1000), st.integers(0, 2**31)


def numbers(size, seed, span=60):
    """Normally distributed ones, whose size changes by block."""
    generator = torch.Generator().manual_seed(seed)
    exponents = (torch.rand(-(-size // 50), generator=generator) - 0.5) * span
    return torch.randn(size, generator=generator) * exponents.exp2().repeat_interleave(50)[:size]


def encoded(values, form, start=0):
    found = BlockFloats.zeros(values.numel(), CPU, form, start)
    found.fill(values)
    return found


@FORMS
@settings(deadline=None, max_examples=40)
@given(size=SIZES, start=STARTS, seed=SEEDS)
def test_what_is_read_is_encoded_to_the_same_numbers(form, size, start, seed):
    once = encoded(numbers(size, seed), form, start)
    again = encoded(once.whole(), form, start)
    assert torch.equal(once.whole(), again.whole())
    if form is FLOAT16:
        assert torch.equal(once.exponents, again.exponents)


@settings(deadline=None, max_examples=40)
@given(size=SIZES, start=STARTS, seed=SEEDS)
def test_the_square_of_a_root_has_that_root(size, start, seed):
    once = encoded(numbers(size, seed, span=100).abs(), E4M3_ROOT, start)
    again = encoded(once.whole().square().sqrt(), E4M3_ROOT, start)
    assert torch.equal(once.whole(), again.whole())


@FORMS
@settings(deadline=None, max_examples=40)
@given(size=SIZES, start=STARTS, seed=SEEDS)
def test_an_error_is_half_a_step_of_the_number_or_of_the_smallest_of_its_block(form, size, start, seed):
    values = numbers(size, seed)
    found = encoded(values, form, start).whole()
    padded = torch.nn.functional.pad(values.abs(), (start % BLOCK, -(start + size) % BLOCK))
    largest = padded.view(-1, BLOCK).amax(1).repeat_interleave(BLOCK)[start % BLOCK :][:size]
    relative, smallest = (2.0**-11, 2.0**-39) if form is FLOAT16 else (2.0**-4, 2.0**-17)
    assert bool(((found - values).abs() <= relative * values.abs() + smallest * largest).all())


@FORMS
@settings(deadline=None, max_examples=40)
@given(size=SIZES, seed=SEEDS, cut=st.integers(0, 700))
def test_two_parts_are_encoded_as_the_whole_but_for_the_block_that_both_have(form, size, seed, cut):
    cut = min(cut, size)
    values = numbers(size, seed)
    whole = encoded(values, form).whole()
    parts = torch.cat([encoded(values[:cut], form).whole(), encoded(values[cut:], form, cut).whole()])
    differing = (whole != parts).nonzero().view(-1) // BLOCK
    assert set(differing.tolist()) <= ({cut // BLOCK} if cut % BLOCK else set())


@FORMS
@settings(deadline=None, max_examples=40)
@given(size=SIZES, start=STARTS, seed=SEEDS, limit=st.integers(BLOCK, 600))
def test_ranges_make_up_the_whole(form, size, start, seed, limit):
    values, found = numbers(size, seed), BlockFloats.zeros(size, CPU, form, start)
    ranges = list(found.ranges(limit))
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == size
    assert all(end - begin <= limit for begin, end in ranges)
    for begin, end in ranges:
        found.write(begin, end, values[begin:end])
    whole = encoded(values, form, start)
    assert torch.equal(found.whole(), whole.whole())
    assert torch.equal(torch.cat([found.read(*pair) for pair in ranges]), whole.whole())


def test_nothing_has_no_ranges():
    assert list(block_ranges(0, 5, BLOCK)) == []
    assert BlockFloats.zeros(0, CPU, FLOAT16, 5).whole().numel() == 0


@FORMS
def test_what_is_not_finite_stays_so_and_leaves_other_blocks_alone(form):
    values = torch.ones(3 * BLOCK)
    values[200], values[201] = float("nan"), float("inf")
    found = encoded(values, form).whole()
    assert found[200].isnan()
    assert not found[201].isfinite()
    assert torch.equal(found[:BLOCK], values[:BLOCK])
    assert torch.equal(found[2 * BLOCK :], values[2 * BLOCK :])


@FORMS
@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e9, 1e30, torch.finfo(torch.float32).max])
def test_numbers_of_every_size_keep_their_sign(form, size):
    if form is E4M3_ROOT and size < 1e-15:
        return
    values = torch.tensor([size, -size, 0.0, size / 8])
    assert torch.equal(encoded(values, form).whole().sign(), values.sign())


@FORMS
def test_it_keeps_a_byte_for_each_block_beside_the_numbers(form):
    found = BlockFloats.zeros(1000, CPU, form, 100)
    kept = sum(tensor.numel() * tensor.element_size() for tensor in (found.numbers, found.exponents))
    assert kept == 1000 * (2 if form is FLOAT16 else 1) + -(-1100 // BLOCK)

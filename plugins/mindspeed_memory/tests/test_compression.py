"""Compression of bfloat16: exact on every bit pattern, smaller on numbers that belong together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_memory.saved.chosen_layers import chosen_layers
from mindspeed_memory.saved.compression import Compressor, compress, restore


def share(numbers):
    """Return compressed bytes by bytes, after seeing that every bit comes back."""
    compressed = compress(numbers)
    again = restore(compressed, torch.empty_like(numbers))
    assert again.view(torch.int16).equal(numbers.view(torch.int16))
    return compressed.nbytes / (2 * numbers.numel())


EVERY = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_every_bit_pattern_comes_back_in_any_order():
    torch.manual_seed(0)
    assert share(EVERY) < 1
    # Neighbours that have nothing in common: a header more than they had.
    assert share(EVERY[torch.randperm(65536)]) == pytest.approx(1.012, abs=1e-3)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_blocks_of_any_numbers_come_back(blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    share(EVERY[torch.randint(0, 65536, (64 * blocks,), generator=generator)])


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (lambda x: x, 0.750),
        (torch.nn.functional.gelu, 0.760),
        (torch.relu, 0.731),
        (torch.zeros_like, 0.512),
    ],
    ids=["normal", "gelu", "relu", "zeros"],
)
def test_numbers_that_belong_together_take_less(numbers, expected):
    torch.manual_seed(0)
    assert share(numbers(torch.randn(65536)).bfloat16()) == pytest.approx(expected, abs=4e-3)


def test_what_is_not_compressed_is_kept():
    compressor = Compressor(smallest=64)
    torch.manual_seed(0)
    assert compressor(torch.randn(64)) is None
    assert compressor(torch.randn(32).bfloat16()) is None
    assert compressor(torch.randn(65).bfloat16()) is None
    assert compressor(EVERY[torch.randperm(65536)]) is None
    assert compressor.before == 0
    assert compressor(torch.randn(640).bfloat16()) is not None
    assert compressor.before == 1280


@pytest.mark.parametrize(
    ("text", "layers"),
    [("0", {1, 2, 3, 4, 5}), ("1-3", {1, 2, 3}), ("1,2", {1, 2}), ("2-3, 5", {2, 3, 5})],
)
def test_lists_of_layers(text, layers):
    assert chosen_layers(text, 5) == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1-6", "1-6 is beyond the layers, which are 1 to 5"),
        ("3-1", "ends before it begins"),
        ("1-3,2", "layer 2 is named twice"),
        ("a", "is no number of a layer and no range"),
        ("0,1", "0 is beyond the layers"),
        ("", "is no number of a layer"),
    ],
)
def test_lists_that_name_no_layers_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        chosen_layers(text, 5)

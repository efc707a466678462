"""Windows over flat parameters: every element once, in order, none too large."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_memory.optim.windows import Piece, cut, windows

SIZES = st.lists(st.integers(0, 200), max_size=8)


@settings(deadline=None)
@given(SIZES, st.integers(1, 100), st.integers(1, 16))
def test_every_element_is_in_one_window(sizes, limit, align):
    found = windows(sizes, max(limit, align), align)
    covered = [(p.index, element) for window in found for p in window for element in range(p.start, p.stop)]
    assert covered == [(index, element) for index, size in enumerate(sizes) for element in range(size)]
    assert all(0 < sum(piece.size for piece in window) <= max(limit, align) for window in found)


@settings(deadline=None)
@given(SIZES, st.integers(1, 100), st.integers(1, 16))
def test_parameters_are_cut_at_multiples(sizes, limit, align):
    for window in windows(sizes, max(limit, align), align):
        for piece in window:
            assert piece.start % align == 0
            assert piece.stop % align == 0 or piece.stop == sizes[piece.index]


@settings(deadline=None)
@given(SIZES, st.integers(1, 100), st.integers(1, 50))
def test_parts_of_a_window_are_the_window(sizes, limit, smaller):
    for window in windows(sizes, limit):
        parts = [piece for part in cut(window, smaller) for piece in part]
        elements = [(p.index, element) for p in parts for element in range(p.start, p.stop)]
        assert elements == [(p.index, element) for p in window for element in range(p.start, p.stop)]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300)), max_size=8),
    st.integers(1, 100),
    st.integers(1, 16),
)
def test_parts_of_larger_parameters_are_cut_at_multiples_of_those(parts, limit, align):
    sizes, leads = [size for size, _ in parts], [start % align for _, start in parts]
    found = windows(sizes, max(limit, align), align, leads)
    smaller = [piece for window in found for part in cut(window, align, align, leads) for piece in part]
    for pieces in ([piece for window in found for piece in window], smaller):
        covered = [(p.index, element) for p in pieces for element in range(p.start, p.stop)]
        assert covered == [(index, element) for index, size in enumerate(sizes) for element in range(size)]
        for piece in pieces:
            assert piece.start == 0 or (leads[piece.index] + piece.start) % align == 0
    assert all(0 < sum(piece.size for piece in window) <= max(limit, align) for window in found)


def test_a_large_parameter_is_spread_over_windows():
    assert windows([5, 2], 3) == [(Piece(0, 0, 3),), (Piece(0, 3, 5), Piece(1, 0, 1)), (Piece(1, 1, 2),)]


def test_windows_smaller_than_the_distance_of_cuts_are_refused():
    with pytest.raises(ValueError, match="windows of 3 elements cannot be cut at multiples of 4"):
        windows([8], 3, 4)

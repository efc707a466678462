from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tune.allocator import MIB, estimate, rounded


def test_sizes_are_rounded_to_512_bytes():
    assert [rounded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_small_tensors_share_segments_of_2_mib():
    found = estimate([(number, 1000) for number in range(10)])
    assert found.allocated == 10 * 1024
    assert found.reserved == 2 * MIB


def test_tensors_below_10_mib_share_segments_of_20_mib_and_larger_ones_have_their_own():
    assert estimate([(0, 3 * MIB), (1, 3 * MIB)]).reserved == 20 * MIB
    assert estimate([(0, 11 * MIB + 1)]).reserved == 12 * MIB


def test_released_blocks_are_used_again_and_joined():
    events = [(0, 4 * MIB), (1, 4 * MIB), (0, 0), (1, 0), (2, 8 * MIB)]
    assert estimate(events).reserved == 20 * MIB


def test_a_large_block_is_split_for_a_smaller_tensor():
    # Only max_split_size_mb would keep it whole.
    assert estimate([(0, 300 * MIB), (0, 0), (1, 100 * MIB), (2, 200 * MIB)]).reserved == 300 * MIB


def test_expandable_segments_waste_less_on_growing_tensors():
    events = []
    for number in range(1, 20):
        events += [(number, number * 11 * MIB), (number, 0)]
    fixed, expandable = estimate(events), estimate(events, expandable=True)
    assert fixed.allocated == expandable.allocated == 19 * 11 * MIB
    assert expandable.reserved < 20 * 11 * MIB < fixed.reserved


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 40 * MIB)), max_size=80), st.booleans())
def test_what_is_reserved_holds_what_is_alive(changes, expandable):
    events, alive, most = [], {}, 0
    for number, size in changes:
        if number in alive:
            del alive[number]
            events.append((number, 0))
        else:
            alive[number] = rounded(size)
            events.append((number, size))
        most = max(most, sum(alive.values()))
    found = estimate(events, expandable=expandable)
    assert found.allocated == most
    assert found.reserved >= most

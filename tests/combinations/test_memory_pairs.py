"""Every pair of memory features trains the same bits on a late device, or is refused with the reason."""

import random

import memory_matrix
import pytest
from memory_pairs import (
    EQUAL,
    LAYOUTS,
    REFUSED,
    STANDS_DOWN,
    Together,
    drawn_pairs,
    features_of,
    pairs_of,
    untrained,
    verdicts,
)

SEED = 43
DRAWN = 3
LOOKED_UP = 8


def wrong(pairs):
    found = verdicts(pairs)
    assert found.keys() == {*pairs}
    expected = (EQUAL, REFUSED, STANDS_DOWN)
    return {str(pair): verdict for pair, verdict in found.items() if not verdict.startswith(expected)}


def test_drawn_pairs_train_the_same():
    assert wrong(drawn_pairs("one process", DRAWN, SEED)) == {}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "first"), [(layout, name) for layout in LAYOUTS for name in [*features_of(layout)][:-1]]
)
def test_every_pair_trains_the_same_or_is_refused(layout, first):
    assert wrong([pair for pair in pairs_of(layout) if pair.names[0] == first]) == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_record_has_every_pair_and_none_is_wrong(layout):
    recorded = memory_matrix.judged(memory_matrix.read()[layout])
    assert recorded.keys() == {pair.names for pair in pairs_of(layout)}
    assert "wrong" not in recorded.values()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_record_is_what_the_resolver_says(layout):
    recorded = memory_matrix.judged(memory_matrix.read()[layout])
    for pair in random.Random(SEED).sample(pairs_of(layout), LOOKED_UP):
        reason = untrained(pair)
        kind = recorded[pair.names]
        assert reason.startswith(STANDS_DOWN) == (kind == "one stands down"), f"{pair}: {reason}"
        # A feature may refuse a model that it looked at only.
        assert not reason.startswith(REFUSED) or kind == "refused", f"{pair}: {reason}"


def test_the_page_has_the_counts_of_the_record():
    lines = memory_matrix.table(memory_matrix.read())
    assert "\n".join(lines) in memory_matrix.PAGE.read_text(encoding="utf-8")


def test_sets_cover_every_pair_and_none_that_is_excluded():
    active = {pair.names for pair in pairs_of("one process") if sum(map(len, pair.names)) % 3}
    sets = [*memory_matrix.covering("one process", active, active, lambda together: len(together.names) < 5)]
    assert all(2 <= len(one.names) < 5 for one in sets)
    found = {(first, second): "equal" for one in sets for first, second in pairs_in(one)}
    assert found.keys() == active
    assert len(sets) < len(active) / 2


def pairs_in(together):
    names = together.names
    return [(first, second) for n, first in enumerate(names) for second in names[n + 1 :]]


@pytest.mark.parametrize(
    ("names", "flag"),
    [
        (("recompute-layers", "recompute-layers-per-pp-rank", "swap-layer-input"), ""),
        (("recompute-layers", "memory-report", "selected norms"), "--recompute-granularity"),
        (("swap-attention", "swap-attention of norms and feed-forward parts"), ""),
    ],
)
def test_a_flag_of_two_values_excludes(names, flag):
    assert Together("one process", names).exclusive() == flag

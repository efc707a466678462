"""Every pair of memory features trains the same bits on a late device, or is refused with the reason."""

import pytest
from memory_pairs import EQUAL, LAYOUTS, REFUSED, drawn_pairs, features_of, pairs_of, verdicts

SEED = 43
DRAWN = 3


def wrong(pairs):
    found = verdicts(pairs)
    assert found.keys() == {*pairs}
    return {str(pair): verdict for pair, verdict in found.items() if not verdict.startswith((EQUAL, REFUSED))}


def test_drawn_pairs_train_the_same():
    assert wrong(drawn_pairs("one process", DRAWN, SEED)) == {}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "first"), [(layout, name) for layout in LAYOUTS for name in [*features_of(layout)][:-1]]
)
def test_every_pair_trains_the_same_or_is_refused(layout, first):
    assert wrong([pair for pair in pairs_of(layout) if pair.names[0] == first]) == {}

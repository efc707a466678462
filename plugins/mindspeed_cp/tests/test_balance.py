"""The balance of work under masks, and the keys that travel: arithmetic on long sequences."""

import itertools

import numpy as np
import pytest

from mindspeed_cp.engine.exchange import exchange, needed_rows
from mindspeed_cp.engine.layout import contiguous
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import balanced_layout, imbalance, travelling_keys

LENGTH = 32768


def packed(mean, seed, **given):
    """Documents of lengths that spread log-normally."""
    random = np.random.default_rng(seed)
    lengths = random.lognormal(np.log(mean) - 0.5, 1.0, 8 * LENGTH // mean)
    ends = np.cumsum(np.maximum(1, lengths.astype(int)))
    return MaskRule(LENGTH, ends=(*(int(end) for end in ends if end < LENGTH), LENGTH), **given)


MASKS = {
    "causal": lambda seed: MaskRule(LENGTH),
    "window of 2048": lambda seed: MaskRule(LENGTH, window=2048),
    "window of 8192": lambda seed: MaskRule(LENGTH, window=8192),
    "documents of 1024": lambda seed: packed(1024, seed),
    "documents of 2048": lambda seed: packed(2048, seed),
    "documents of 8192": lambda seed: packed(8192, seed),
    "documents seen from both sides": lambda seed: packed(4096, seed, causal=False),
    "prefix of a half": lambda seed: MaskRule(LENGTH, prefix=LENGTH // 2),
    "window and a tenth seen by all": lambda seed: MaskRule(LENGTH, window=2048, prefix=LENGTH // 10),
}


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("mask", MASKS)
def test_the_work_of_every_mask_is_even_within_five_percent(mask, ranks):
    seeds = range(10 if "documents" in mask else 1)
    for rule in (MASKS[mask](seed) for seed in seeds):
        layout = balanced_layout([rule], ranks)
        assert imbalance(layout, [rule]) <= 1.05
        assert set(layout.lengths) == {LENGTH // ranks}


def test_samples_with_different_documents_are_balanced_together():
    rules = [packed(2048, seed) for seed in range(4)]
    assert imbalance(balanced_layout(rules, 8), rules) <= 1.05


def test_packed_documents_need_less_than_half_of_the_keys_that_a_ring_moves():
    moved = []
    for seed in range(10):
        rule = packed(2048, seed)
        layout = balanced_layout([rule], 8)
        needed = needed_rows(layout, [rule])
        plans = [exchange(layout, rank, needed) for rank in range(8)]
        foreign = sum(
            len(rows) for rank, p in enumerate(plans) for to, rows in enumerate(p.send) if to != rank
        )
        assert foreign == travelling_keys(layout, [rule])
        moved.append(foreign / (7 * LENGTH))
    assert np.mean(moved) <= 0.45


def interleaved(documents, strip, length, causal):
    """Documents whose strips alternate, as tokens of several sources do."""
    document = np.arange(length) // strip % documents
    seen = document[:, None] == document[None, :]
    return MaskRule(length, causal=False, matrix=np.tril(seen) if causal else seen)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_a_given_matrix_that_see_the_same_are_brought_together(causal):
    rule, ring = interleaved(6, 128, 8192, causal), 7 * 8192
    apart, together = (balanced_layout([rule], 8, regroup=regroup) for regroup in (False, True))
    assert travelling_keys(together, [rule]) <= 0.2 * ring
    assert travelling_keys(apart, [rule]) > 0.5 * ring
    assert imbalance(together, [rule]) <= 1.05


def test_a_matrix_without_groups_keeps_its_order():
    matrix = np.tril(np.ones((2048, 2048), dtype=bool))
    rule = MaskRule(2048, causal=False, matrix=matrix)
    assert balanced_layout([rule], 4, regroup=True) == balanced_layout([rule], 4)


def test_work_is_counted_in_tiles_or_in_scores():
    # One score in each tile of the first half costs as much as the whole of the second half.
    matrix = np.zeros((1024, 1024), dtype=bool)
    matrix[512:] = True
    matrix[:512:128, ::128] = True
    rule = MaskRule(1024, causal=False, matrix=matrix)
    assert balanced_layout([rule], 2, tile=128) == contiguous(1024, 2)
    assert imbalance(balanced_layout([rule], 2, tile=128), [rule]) > 1.9
    assert imbalance(balanced_layout([rule], 2, tile=1), [rule]) <= 1.05


@pytest.mark.parametrize(("ranks", "chunks"), list(itertools.product((2, 8), (1, 2, 4))))
def test_the_number_of_chunks_can_be_given(ranks, chunks):
    layout = balanced_layout([packed(1024, 0)], ranks, chunks)
    assert all(len(share) <= chunks for share in layout.shares)

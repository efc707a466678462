"""Operations of attention on NPUs: bands, for which torch_npu has no formula, and masks that it counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_megatron.instruments import npu_operations
from mindspeed_megatron.instruments.npu_operations import npu_formula, visible_scores

sizes = st.integers(1, 9)
distances = st.integers(0, 12)


@settings(deadline=None)
@given(queries=sizes, keys=sizes, behind=distances, ahead=distances)
def test_a_band_has_the_scores_that_its_mask_leaves(queries, keys, behind, ahead):
    row, column = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    mask = (column >= row - behind) & (column <= row + ahead)
    assert visible_scores(queries, keys, behind, ahead) == int(mask.sum())


def counted(query, key, value, heads, layout, *rest, sparse_mode=0, **named):
    """Count like torch_npu, which knows causal masks and none."""
    mode = rest[11] if len(rest) > 11 else sparse_mode
    if mode not in (0, 2, 3):
        raise ValueError(mode)
    return 4 * query.numel() * key.shape[0] / (1 if mode == 0 else 2)


@pytest.fixture
def formulas(monkeypatch):
    monkeypatch.setattr(npu_operations, "_theirs", lambda name: counted)
    return npu_formula("npu_fusion_attention"), npu_formula("npu_fusion_attention_grad")


ROWS = torch.empty(8, 1, 16)
WHOLE = 4 * ROWS.numel() * 8


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 1.0),
        ({"sparse_mode": 2}, 0.5),
        ({"sparse_mode": 1}, 1.0),
        ({"sparse_mode": 4, "pre_tockens": 0, "next_tockens": 0}, 8 / 64),
        ({"sparse_mode": 4, "pre_tockens": 8, "next_tockens": 0}, 36 / 64),
    ],
)
def test_attention_counts_the_scores_of_its_mask(formulas, options, share):
    forward, backward = formulas
    assert forward(ROWS, ROWS, ROWS, 2, "SBH", **options) == WHOLE * share
    assert backward(ROWS, ROWS, ROWS, ROWS, 2, "SBH", **options) == WHOLE * share * 5 / 2


def test_a_mask_among_positions_is_read_too(formulas):
    forward, _ = formulas
    rest = (None, None, None, 1.0, 1.0, 0, 0, 0, None, None, None, 4)
    assert forward(ROWS, ROWS, ROWS, 2, "SBH", *rest) == WHOLE * 8 / 64

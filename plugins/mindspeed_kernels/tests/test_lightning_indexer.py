"""The indexer of sparse attention on CPU: choice, order, what is hidden, gradients, refusals."""

import pytest
import torch

from mindspeed_kernels.ops import ContractError, npu_lightning_indexer


def operands(batch=2, rows=3, keys=5, heads=4, width=6, dtype=torch.float64):
    torch.manual_seed(3)
    return (
        torch.randn(batch, rows, heads, width, dtype=dtype),
        torch.randn(batch, keys, 1, width, dtype=dtype),
        torch.randn(batch, rows, heads, dtype=dtype),
    )


def test_the_keys_with_the_highest_weighted_positive_products_come_first():
    query = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    key = torch.tensor([[[[3.0, -9.0]], [[2.0, 2.0]], [[-5.0, 1.0]]]])
    weights = torch.tensor([[[1.0, 2.0]]])
    places, scores = npu_lightning_indexer(query, key, weights, sparse_count=3, sparse_mode=0)
    assert places.dtype == torch.int32
    assert places.flatten().tolist() == [1, 0, 2]
    assert scores.flatten().tolist() == [6.0, 3.0, 2.0]


def test_a_query_sees_the_keys_up_to_its_own_and_has_no_place_beyond():
    places, scores = npu_lightning_indexer(*operands(), sparse_count=4)
    assert [[(row >= 0).sum().item() for row in one] for one in places[:, :, 0]] == [[3, 4, 4]] * 2
    assert bool((places[:, :2, 0].amax(-1) <= torch.tensor([2, 3])).all())
    assert torch.equal(scores.isinf(), places < 0)


def test_more_keys_than_there_are_leave_places_empty():
    places, scores = npu_lightning_indexer(*operands(), sparse_count=9, sparse_mode=0)
    assert bool((places[..., 5:] == -1).all() and scores[..., 5:].isneginf().all())
    assert torch.equal(places[..., :5].sort(-1).values.long(), torch.arange(5).expand(2, 3, 1, 5))


def test_a_query_before_every_key_finds_none_and_gets_no_gradient():
    query, key, weights = operands(rows=3, keys=2)
    query.requires_grad_()
    places, scores = npu_lightning_indexer(query, key, weights, sparse_count=2)
    assert bool((places[:, 0] == -1).all())
    scores[:, 1:].clamp(min=-1e3).sum().backward()
    assert not query.grad[:, 0].any()


@pytest.mark.parametrize("mode", [0, 3])
def test_gradients_are_those_of_small_differences(mode):
    leaves = [one.requires_grad_() for one in operands()]

    def scores(*given):
        return npu_lightning_indexer(*given, sparse_count=4, sparse_mode=mode)[1].clamp(min=-1e3)

    assert torch.autograd.gradcheck(scores, leaves)


def test_scores_of_half_operands_are_summed_in_float32():
    query, key, weights = operands(heads=64, width=128, dtype=torch.bfloat16)
    _, scores = npu_lightning_indexer(query, key, weights, sparse_count=5, sparse_mode=0)
    wide = npu_lightning_indexer(query.float(), key.float(), weights.float(), sparse_count=5, sparse_mode=0)
    assert torch.equal(scores, wide[1].bfloat16())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"layout": "TND"}, "layout"),
        ({"cu_seq_lens_q": torch.tensor([3])}, "cu_seq_lens_q"),
        ({"cu_seq_lens_k": torch.tensor([5])}, "cu_seq_lens_k"),
        ({"sparse_count": 0}, "sparse_count"),
        ({"sparse_mode": 1}, "sparse_mode"),
        ({"pre_tokens": 5}, "pre_tokens"),
        ({"next_tokens": 0}, "next_tokens"),
        ({"cmp_ratio": 4}, "cmp_ratio"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(given, named):
    with pytest.raises(ContractError, match=f"npu_lightning_indexer.*{named}"):
        npu_lightning_indexer(*operands(), **given)


def test_numbers_are_judged_on_every_call_not_only_on_the_first_of_a_kind():
    npu_lightning_indexer(*operands(), cmp_ratio=1)
    with pytest.raises(ContractError, match="cmp_ratio must be one of 1"):
        npu_lightning_indexer(*operands(), cmp_ratio=4)

"""The loss of the indexer on CPU: its least value, its limits, what gets gradients, refusals."""

import pytest
import torch

from mindspeed_kernels.ops import ContractError
from mindspeed_kernels.ops import npu_sparse_lightning_indexer_grad_kl_loss as indexer_loss


def operands(scores=(0.0, 0.0)):
    """Two keys that attention weighs alike, and an indexer that gives them scores."""
    query, key = torch.zeros(1, 1, 1, 2), torch.ones(2, 1, 2)
    query_index, key_index = torch.ones(1, 1, 1, 1), torch.tensor(scores).view(2, 1, 1, 1)
    places = torch.tensor([[[1, 0, -1]]], dtype=torch.int32)
    statistics = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), 2.0)
    return [query, key, query_index, key_index, torch.ones(1, 1, 1), places, *statistics]


def test_an_indexer_that_agrees_with_attention_loses_nothing_and_is_not_moved():
    given = operands((0.5, 0.5))
    leaves = [one.requires_grad_() for one in given[2:5]]
    loss = indexer_loss(*given)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert all(leaf.grad.abs().max() < 1e-6 for leaf in leaves)


def test_the_gradient_of_a_score_is_how_much_more_likely_the_indexer_takes_it():
    given = operands((2.0, 1.0))
    given[3].requires_grad_()
    loss = indexer_loss(*given)
    loss.backward()
    q = torch.softmax(torch.tensor([2.0, 1.0]), 0)
    torch.testing.assert_close(loss.detach(), (0.5 * (0.5 / q).log()).sum())
    torch.testing.assert_close(given[3].grad.flatten(), q - 0.5)


def test_the_logarithm_of_what_the_indexer_rules_out_is_limited():
    loss = indexer_loss(*operands((99.0, 0.0)))
    assert loss.item() == pytest.approx(0.5 * torch.tensor(0.5 / 1e-8).log().item() - 0.3466, abs=1e-3)


def test_attention_gets_no_gradient():
    given = operands((2.0, 1.0))
    for one in (*given[:5], *given[6:]):
        one.requires_grad_()
    indexer_loss(*given).backward()
    assert [one.grad is None for one in (given[0], given[1], given[6], given[7])] == [True] * 4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sparse_mode": 0}, "sparse_mode"),
        ({"cmp_ratio": 4}, "cmp_ratio"),
        ({"pre_tokens": 5}, "pre_tokens"),
        ({"layout": "TND"}, "layout"),
        ({"actual_seq_qlen": [1]}, "actual_seq_qlen"),
        ({"query_rope": torch.zeros(1, 1, 1, 2)}, "query_rope"),
    ],
)
def test_what_is_not_computed_is_refused_by_name_also_after_a_sound_call(options, named):
    sound = {"sparse_mode": 3, "cmp_ratio": 1, "pre_tokens": 2**31 - 1}
    indexer_loss(*operands(), **{name: sound[name] for name in options if name in sound})
    with pytest.raises(ContractError, match=f"{named}"):
        indexer_loss(*operands(), **options)


def test_a_query_without_a_key_is_refused():
    given = operands()
    given[1], given[3] = given[1][:0], given[3][:0]
    with pytest.raises(ContractError, match="at least as many keys as queries"):
        indexer_loss(*given)

"""Experts with a capacity against one-hot products written out, in float64; order and cost of places."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from mindspeed_moe.capacity_rows import from_places, places_of, to_places
from mindspeed_moe.gshard import capacity_of, kept_choices, masks_of, weights_of
from mindspeed_moe.gshard_router import GShardRouter
from mindspeed_moe.options import GShard

TOKENS, EXPERTS, HIDDEN, WIDTH = 64, 4, 16, 8


def operands():
    made = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=made).requires_grad_()

    return (
        draw(TOKENS, HIDDEN),
        draw(HIDDEN, EXPERTS),
        draw(EXPERTS, HIDDEN, WIDTH),
        draw(EXPERTS, WIDTH, HIDDEN),
    )


def experts(rows, first, second):
    """Return ``[E, C, h]`` of ``[E, C, h]``."""
    return torch.bmm(torch.nn.functional.silu(torch.bmm(rows, first)), second)


def by_tables(tokens, gate, first, second, choices, capacity):
    scores = (tokens @ gate).softmax(-1)
    kept = kept_choices(masks_of(scores.topk(choices).indices, EXPERTS), capacity)
    weights = weights_of(scores, kept, choices)
    places = places_of(kept, capacity, choices)
    rows = to_places(tokens, places).view(EXPERTS, capacity, HIDDEN)
    results = experts(rows, first, second).view(-1, HIDDEN)
    return from_places(results, weights.gather(1, places.experts), places), kept


def by_one_hot_products(tokens, gate, first, second, choices, capacity):
    """GShard's algorithm with a dispatch tensor ``[T, E, C]``, tokens one after another."""
    scores = (tokens @ gate).softmax(-1)
    chosen = scores.topk(choices).indices
    used = [0] * EXPERTS
    dispatch = torch.zeros(TOKENS, EXPERTS, capacity, dtype=torch.float64)
    for choice in range(choices):
        for token in range(TOKENS):
            expert = int(chosen[token, choice])
            if used[expert] < capacity:
                dispatch[token, expert, used[expert]] = 1
            used[expert] += 1
    kept = dispatch.sum(-1)
    weights = scores * kept
    if choices == 2:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).eps)
    rows = torch.einsum("tec,th->ech", dispatch, tokens)
    combine = dispatch * weights.unsqueeze(-1)
    return torch.einsum("tec,ech->th", combine, experts(rows, first, second)), kept.bool()


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("choices", [1, 2])
def test_results_and_gradients_are_those_of_one_hot_products(choices, factor):
    capacity = capacity_of(TOKENS, EXPERTS, choices, factor)
    found = []
    for path in (by_tables, by_one_hot_products):
        leaves = operands()
        output, kept = path(*leaves, choices, capacity)
        output.square().sum().backward()
        found.append((kept, output.detach(), *(leaf.grad for leaf in leaves)))
    (ours, *tables), (theirs, *products) = found
    assert torch.equal(ours, theirs)
    dropped = TOKENS * choices - int(ours.sum())
    assert (dropped > 0) == (factor < 4)
    for mine, written in zip(tables, products, strict=True):
        assert (mine - written).abs().max() <= 1e-14 * max(1.0, float(written.abs().max()))


def test_a_token_without_a_place_is_zero_and_learns_nothing():
    tokens = torch.randn(3, HIDDEN, dtype=torch.float64).requires_grad_()
    places = places_of(torch.tensor([[True], [True], [True]]), 2, 1)
    output = from_places(to_places(tokens, places), torch.ones(3, 1, dtype=torch.float64), places)
    output.sum().backward()
    assert output[2].abs().sum() == 0
    assert tokens.grad[2].abs().sum() == 0
    assert torch.equal(output[:2], tokens[:2])


def test_a_thousand_tokens_get_their_own_rows_back():
    """Experts that keep rows as they are give each token itself: places are in order of arrival."""
    tokens = torch.arange(1024.0).unsqueeze(1)
    chosen = torch.randint(0, 4, (1024, 1), generator=torch.Generator().manual_seed(1))
    kept = kept_choices(masks_of(chosen, 4), 512)
    places = places_of(kept, 512, 1)
    rows = to_places(tokens, places)
    for expert in range(4):
        assert torch.equal(
            rows.view(4, 512)[expert][: int(kept[:, expert].sum())], tokens.view(-1)[kept[:, expert]]
        )
    assert torch.equal(from_places(rows, torch.ones(1024, 1), places), tokens * kept.any(1, keepdim=True))


def test_first_choices_come_before_second_ones():
    masks = masks_of(torch.tensor([[1, 0], [0, 1], [0, 1]]), 2)
    assert kept_choices(masks, 2).tolist() == [[False, True], [True, True], [True, False]]


def test_tokens_take_places_in_the_given_order():
    masks = masks_of(torch.tensor([[0], [0], [0]]), 1)
    assert kept_choices(masks, 2, torch.tensor([2, 1, 0])).view(-1).tolist() == [False, True, True]


@pytest.mark.parametrize(("factor", "capacity"), [(1.0, 32), (1.01, 33), (0.01, 4), (100.0, 64)])
def test_the_capacity_lies_between_the_least_and_all_tokens(factor, capacity):
    assert capacity_of(64, 4, 2, factor) == capacity


class Alone:
    def size(self):
        return 1

    def rank(self):
        return 0


def router(kind, choices=2, **options):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=choices,
        moe_router_pre_softmax=choices == 1,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=options.pop("coefficient", 0.0),
        add_bias_linear=False,
    )
    groups = SimpleNamespace(tp=Alone(), cp=Alone(), tp_cp=Alone(), tp_dp_cp=Alone())
    made = kind(config, groups, **options)
    made.set_layer_number(1)
    return made


LOGITS = torch.randn(TOKENS, 1, EXPERTS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize("choices", [1, 2])
def test_without_drops_routes_are_megatron_cores(choices):
    ours, theirs = (LOGITS.clone().requires_grad_() for _ in range(2))
    probs, chosen = router(GShardRouter, choices, gshard=GShard(None)).routing(ours)
    expected, expected_map = router(TopKRouter, choices).routing(theirs)
    assert torch.equal(chosen, expected_map)
    probs.square().sum().backward()
    expected.square().sum().backward()
    # megatron-core's softmax is float32, whatever the logits are.
    torch.testing.assert_close(probs, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_the_loss_is_that_of_first_choices(monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))
    ours, theirs = (LOGITS.clone().requires_grad_() for _ in range(2))
    made = router(GShardRouter, gshard=GShard(0.5), coefficient=0.3)
    (made.routing(ours)[0] * 0).sum().backward()
    scores = theirs.view(-1, EXPERTS).softmax(-1)
    first = torch.nn.functional.one_hot(scores.argmax(-1), EXPERTS).to(scores.dtype)
    (0.3 * EXPERTS * (scores.mean(0) * first.mean(0)).sum()).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=1e-16)


def test_evaluation_draws_nothing_and_keeps_the_first_tokens():
    options = GShard(0.5, noise="RSample", random_tokens=True, sinkhorn=True)
    made = router(GShardRouter, 1, gshard=options).eval()
    scores = LOGITS.view(-1, EXPERTS).softmax(-1)
    expected = kept_choices(masks_of(scores.argmax(-1, keepdim=True), EXPERTS), 8)
    assert torch.equal(made.routing(LOGITS)[1], expected)

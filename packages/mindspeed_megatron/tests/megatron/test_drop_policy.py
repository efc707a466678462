"""Experts with a capacity keep the first tokens, as their definition in plain torch does."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

from mindspeed_megatron.drop_policy import keeping_the_first
from mindspeed_testing.dense_experts import routes

drop = keeping_the_first(apply_router_token_dropping)


@given(
    tokens=st.integers(1, 24),
    experts=st.sampled_from((2, 4, 8)),
    factor=st.sampled_from((0.25, 0.5, 1.0, 1.5, 8.0)),
    policy=st.sampled_from(("probs", "position")),
    seed=st.integers(0, 1000),
)
def test_drops_are_those_of_the_definition_with_and_without_padding(tokens, experts, factor, policy, seed):
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    chosen = routes(logits, 2)
    wanted = routes(logits, 2, capacity_factor=factor, policy=policy)
    probs, kept = drop(chosen.weights, chosen.chosen, 2, factor, policy, False)
    assert torch.equal(kept, wanted.kept)
    assert torch.equal(probs, wanted.weights)
    padded_probs, padded = drop(chosen.weights, chosen.chosen, 2, factor, policy, True)
    assert torch.equal(padded_probs, wanted.weights)
    assert len(set(padded.sum(dim=0).tolist())) == 1


def test_without_it_other_tokens_are_kept():
    chosen = torch.ones(64, 2, dtype=torch.bool)
    kept = drop(chosen.float() / 2, chosen, 2, 0.25, "position")[1]
    assert kept.nonzero()[:, 0].tolist() == [token for token in range(16) for _ in range(2)]
    native = apply_router_token_dropping(chosen.float() / 2, chosen, 2, 0.25, "position")[1]
    assert not torch.equal(native, kept)

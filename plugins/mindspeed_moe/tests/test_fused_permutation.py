"""Fused permutations of tokens, on one rank: equal to megatron-core's, with gradients of probabilities."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from mindspeed_moe import dispatchers
from mindspeed_moe.dispatchers import FusedAllToAllDispatcher, LaunchedAllToAllDispatcher

EXPERTS = 8


class Alone:
    """A group of one rank."""

    def size(self):
        return 1

    def rank(self):
        return 0


def dispatcher(kind, choices, capacity):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=choices,
        moe_router_pre_softmax=True,
        moe_token_dispatcher_type="alltoall",
        moe_expert_capacity_factor=capacity,
        moe_pad_expert_input_to_capacity=capacity is not None,
        add_bias_linear=False,
    )
    groups = SimpleNamespace(ep=Alone(), expt_tp=Alone(), tp_ep=Alone())
    with patch.object(torch.cuda, "Stream", lambda: None):
        made = kind(EXPERTS, list(range(EXPERTS)), config=config, pg_collection=groups)
    # Without a session, which answers for the device, there is none to copy numbers of rows from.
    made._maybe_dtoh_and_synchronize = lambda point, numbers: numbers
    return made


def passed(kind, choices, capacity, *, empty=False):
    """Return what goes to experts, what comes back, and the gradients of tokens and probabilities."""
    made = torch.Generator().manual_seed(choices)
    hidden = torch.randn(6, 2, 16, generator=made).requires_grad_()
    scores = torch.rand(12, EXPERTS, generator=made)
    if empty:
        scores[:, 0] = -1.0
    chosen = torch.zeros(12, EXPERTS).scatter(1, scores.topk(choices).indices, 1).bool()
    if capacity is not None:
        most = int(12 * choices / EXPERTS * capacity + 0.999)
        kept = scores.masked_fill(~chosen, -2.0).topk(most, dim=0).indices
        chosen = chosen & torch.zeros(12, EXPERTS).scatter(0, kept, 1).bool()
    probs = (scores * chosen).requires_grad_()
    call = dispatcher(kind, choices, capacity)
    rows, row_probs = call.dispatch_preprocess(hidden, chosen, probs)
    back = call.combine_postprocess(rows * row_probs.unsqueeze(-1))
    (back.square().sum() + row_probs.sum()).backward()
    return rows, row_probs, back, hidden.grad, probs.grad * chosen


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("choices", [1, 2, 3, 7])
def test_rows_results_and_gradients_are_those_of_the_unfused_permutation(choices, capacity):
    fused = passed(FusedAllToAllDispatcher, choices, capacity)
    plain = passed(LaunchedAllToAllDispatcher, choices, capacity)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_an_expert_without_tokens_changes_nothing():
    fused = passed(FusedAllToAllDispatcher, 2, None, empty=True)
    plain = passed(LaunchedAllToAllDispatcher, 2, None, empty=True)
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.equal(ours, theirs)


def test_both_directions_run_the_operators():
    names = ("npu_moe_token_permute_with_routing_map", "npu_moe_token_unpermute_with_routing_map")
    called = []

    def noted(name):
        operator = getattr(dispatchers, name)
        return patch.object(dispatchers, name, lambda *a, **k: called.append(name) or operator(*a, **k))

    with noted(names[0]), noted(names[1]):
        passed(FusedAllToAllDispatcher, 2, None)
    assert called == list(names)

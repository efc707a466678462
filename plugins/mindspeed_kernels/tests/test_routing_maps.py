"""Permutation by routing map: equal to megatron-core's own, its gradients, what it refuses."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute

from mindspeed_kernels.ops import (
    ContractError,
    npu_moe_token_permute_with_routing_map,
    npu_moe_token_unpermute_with_routing_map,
)
from mindspeed_kernels.ops.permutation import MoePermuteMaskMap, MoeUnpermuteMaskMap

TOKENS, WIDTH, EXPERTS, COPIES, CAPACITY = 9, 6, 5, 2, 4
NUMBER = {False: TOKENS * COPIES, True: EXPERTS * CAPACITY}


def made(padded=False, dtype=torch.float64):
    """Tokens, a map and probabilities; padded, every expert keeps its most probable tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    probs = torch.rand(TOKENS, EXPERTS, generator=generator, dtype=dtype)
    dim, count = (0, CAPACITY) if padded else (1, COPIES)
    chosen = probs.topk(count, dim=dim).indices
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(dim, chosen, True)
    return tokens, routing_map, (probs * routing_map).requires_grad_()


def gradients(outputs, inputs):
    generator = torch.Generator().manual_seed(1)
    outer = [torch.randn(item.shape, generator=generator, dtype=item.dtype) for item in outputs]
    return torch.autograd.grad(outputs, inputs, outer)


@pytest.mark.parametrize("padded", [False, True])
def test_sorted_tokens_and_their_gradients_are_those_of_megatron_core(padded):
    tokens, routing_map, probs = made(padded)
    options = {"probs": probs, "num_out_tokens": NUMBER[padded], "drop_and_pad": padded}
    expected = permute(tokens, routing_map, **options)[:2]
    got = npu_moe_token_permute_with_routing_map(tokens, routing_map, **options)[:2]
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(gradients(got, (tokens, probs)), gradients(expected, (tokens, probs)))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("weighed", [False, True])
def test_results_brought_back_and_their_gradients_are_those_of_megatron_core(padded, weighed):
    tokens, routing_map, probs = made(padded)
    number = NUMBER[padded]
    rows = torch.randn(number, WIDTH, dtype=torch.float64, requires_grad=True)
    shape, inputs = tokens.shape, (rows, probs) if weighed else (rows,)
    theirs = permute(tokens, routing_map, num_out_tokens=number, drop_and_pad=padded)[2]
    ours = npu_moe_token_permute_with_routing_map(
        tokens, routing_map, num_out_tokens=number, drop_and_pad=padded
    )[2]
    options = {"probs": probs if weighed else None, "routing_map": routing_map, "drop_and_pad": padded}
    expected = unpermute(rows, theirs, shape, **options)
    got = npu_moe_token_unpermute_with_routing_map(rows, ours, shape, **options)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradients([got], inputs), gradients([expected], inputs))


def test_there_and_back_is_the_token_times_the_sum_of_its_probabilities():
    tokens, routing_map, probs = made()
    rows, weights, where = MoePermuteMaskMap.apply(tokens, routing_map, probs, NUMBER[False])
    back = MoeUnpermuteMaskMap.apply(rows, where, tokens.shape, probs, routing_map)
    torch.testing.assert_close(back, tokens * probs.sum(1, keepdim=True))
    once = MoeUnpermuteMaskMap.apply(rows * weights.unsqueeze(1), where, tokens.shape)
    torch.testing.assert_close(once, back)


def test_probabilities_keep_their_dtype_beside_tokens_of_half_precision():
    tokens, routing_map, probs = made(dtype=torch.float32)
    rows, weights, _ = npu_moe_token_permute_with_routing_map(
        tokens.bfloat16(), routing_map.to(torch.int8), probs=probs
    )
    assert rows.dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    assert sorted(weights.tolist()) == sorted(probs[routing_map].tolist())


def test_no_token_and_no_expert_of_any():
    tokens, routing_map, probs = made()
    rows, weights, where = npu_moe_token_permute_with_routing_map(
        tokens, torch.zeros_like(routing_map), probs=probs, num_out_tokens=0
    )
    assert rows.shape == (0, WIDTH)
    assert weights.numel() == where.numel() == 0
    back = npu_moe_token_unpermute_with_routing_map(rows, where, tokens.shape)
    assert torch.equal(back, torch.zeros_like(tokens))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({(3, 0): True}, {"num_out_tokens": 18}, "as many experts, 2 .* got 3 for token 3"),
        ({}, {"num_out_tokens": 9}, "as many experts, 1 .* got 2 for token 0"),
        ({}, {"num_out_tokens": 46 + 9}, "0 to 45, got 55"),
        ({}, {"drop_and_pad": True}, "drop_and_pad needs num_out_tokens"),
        ({}, {"drop_and_pad": True, "num_out_tokens": 50}, "a capacity of at most 9"),
    ],
)
def test_numbers_that_do_not_fit_the_map_are_refused(change, options, message):
    tokens, routing_map, _ = made()
    routing_map[(0, 1, 2, 3), :] = torch.tensor([False, True, True, False, False])
    for place, value in change.items():
        routing_map[place] = value
    with pytest.raises(ContractError, match=message):
        npu_moe_token_permute_with_routing_map(tokens, routing_map, **options)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((9, 5), {}, "must be those of permuted_tokens"),
        ((7, 6), {}, "18 rows are not as many for each of 7 tokens"),
        ((9, 6), {"probs": torch.rand(9, 5)}, "probs need routing_map"),
        ((6, 6), {"routing_map": torch.ones(9, 5) > 0}, "6 tokens, probs or routing_map 9"),
        (
            (9, 6),
            {"probs": torch.rand(9, 5), "routing_map": torch.eye(9, 5) > 0},
            "as many experts, 2 .* got 1 for token 0",
        ),
    ],
)
def test_results_that_do_not_fit_their_tokens_are_refused(shape, options, message):
    rows, where = torch.rand(18, 6), torch.arange(18, dtype=torch.int32)
    with pytest.raises(ContractError, match=message):
        npu_moe_token_unpermute_with_routing_map(rows, where, shape, **options)

"""Routers with balance between devices, and with fixed routes: against formulas written out."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from mindspeed_moe.options import DeviceLosses
from mindspeed_moe.routers import DeviceBalancedRouter, FixedRouter, device_losses

OPTIONS = DeviceLosses(balance=0.7, communication=0.3, devices=3, choices=2, reached=2)


@pytest.fixture(autouse=True)
def whole_losses(monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))


def written_out(scores, chosen, options):
    """Return both losses of DeepSeek-V2 in its own terms: f and P of experts, then of devices."""
    (tokens, experts), on_each = scores.shape, scores.shape[1] // options.devices
    loss = 0
    for device in range(options.devices):
        members = range(device * on_each, (device + 1) * on_each)
        of_experts = [experts / (options.choices * tokens) * int(chosen[:, e].sum()) for e in members]
        score = sum(scores[:, e].sum() / tokens for e in members)
        sent = sum(any(bool(chosen[t, e]) for e in members) for t in range(tokens))
        loss = loss + options.balance * sum(of_experts) / on_each * score
        loss = loss + options.communication * options.devices / (options.reached * tokens) * sent * score
    return loss


def choices(tokens=7, experts=6, dtype=torch.float64):
    scores = torch.rand(tokens, experts, dtype=dtype, generator=torch.Generator().manual_seed(3))
    scores = scores.softmax(-1)
    return scores, torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1).bool()


def test_the_losses_and_their_gradients_are_those_of_the_formulas():
    scores, chosen = choices()
    ours, theirs = (scores.clone().requires_grad_() for _ in range(2))
    loss = device_losses(ours, chosen, None, OPTIONS, lambda counts: counts)
    expected = written_out(theirs, chosen, OPTIONS)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=0)


def test_the_shares_of_ranks_add_up_to_the_loss():
    scores, chosen = choices(8)
    parts = [(scores[:4], chosen[:4]), (scores[4:], chosen[4:])]
    counts = []
    for part in parts:
        device_losses(*part, None, OPTIONS, lambda mine: counts.append(mine) or mine)
    shares = [device_losses(*part, None, OPTIONS, lambda mine: sum(counts)) for part in parts]
    torch.testing.assert_close(sum(shares), written_out(scores, chosen, OPTIONS), rtol=1e-13, atol=0)


def test_tokens_that_do_not_count_are_left_out():
    scores, chosen = choices()
    valid = torch.tensor([True, False, True, True, False, True, True])
    loss = device_losses(scores, chosen, valid, OPTIONS, lambda counts: counts)
    torch.testing.assert_close(loss, written_out(scores[valid], chosen[valid], OPTIONS), rtol=1e-13, atol=0)


def test_counts_of_scores_in_half_precision_are_exact():
    scores, chosen = choices(3000, dtype=torch.float32)
    half = scores.bfloat16()
    expected = written_out(half.double(), chosen, OPTIONS)
    assert device_losses(half, chosen, None, OPTIONS, lambda counts: counts).item() == pytest.approx(
        float(expected), rel=1e-5
    )


class Alone(SimpleNamespace):
    """A group of one rank."""

    def size(self):
        return 1

    def rank(self):
        return 0


class Second(Alone):
    """The second of two ranks."""

    def rank(self):
        return 1


def router(kind, group=None, **options):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=6,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        **{key: options.pop(key) for key in list(options) if key.startswith(("moe_", "calculate"))},
    )
    group = group or Alone()
    groups = SimpleNamespace(tp=group, cp=group, tp_cp=Alone(), tp_dp_cp=group)
    return kind(config, groups, **options)


LOGITS = torch.randn(7, 1, 6, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(("per_token_loss", "weight"), [(False, 1), (True, 7)])
def test_a_router_adds_the_gradient_of_the_losses_to_that_of_the_model(per_token_loss, weight):
    ours, theirs = (LOGITS.clone().requires_grad_() for _ in range(2))
    plain, chosen = router(TopKRouter).routing(theirs)
    expected = plain.square().sum()
    expected = expected + weight * written_out(theirs.view(7, 6).softmax(-1), chosen, OPTIONS)
    expected.backward()
    balanced = router(DeviceBalancedRouter, losses=OPTIONS, calculate_per_token_loss=per_token_loss)
    probs, _ = balanced.routing(ours)
    torch.testing.assert_close(probs, plain, rtol=0, atol=0)
    probs.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_an_evaluated_router_has_no_losses():
    evaluated = router(DeviceBalancedRouter, losses=OPTIONS).eval()
    logits = LOGITS.clone().requires_grad_()
    probs, _ = evaluated.routing(logits)
    (gradient,) = torch.autograd.grad(probs.sum(), logits)
    assert gradient.abs().max() < 1e-6


SCORINGS = {
    "softmax of the chosen": {},
    "softmax of all": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.0},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
}


@pytest.mark.parametrize("scoring", SCORINGS)
def test_fixed_routes_have_the_probabilities_of_their_experts(scoring):
    """Nothing differs where scores happen to choose the experts whose turn it is."""
    in_turn = torch.zeros(7, 6).scatter(1, torch.arange(14).view(7, 2) % 6, 10.0).view(7, 1, 6)
    expected, chosen = router(TopKRouter, **SCORINGS[scoring]).routing(LOGITS + in_turn)
    probs, routing_map = router(FixedRouter, **SCORINGS[scoring]).routing(LOGITS + in_turn)
    assert torch.equal(routing_map, chosen)
    assert torch.equal(probs, expected)


def test_fixed_routes_load_all_experts_evenly_over_ranks():
    maps = [router(FixedRouter, group).routing(LOGITS)[1] for group in (Alone(), Second())]
    assert all(torch.equal(found.sum(1), torch.full((7,), 2)) for found in maps)
    counts = sum(found.sum(0) for found in maps)
    assert counts.max() - counts.min() <= 1


def test_fixed_routes_keep_the_loss_of_the_logits():
    with_loss, without = (LOGITS.clone().requires_grad_() for _ in range(2))
    router(FixedRouter, moe_z_loss_coeff=0.5).routing(with_loss)[0].square().sum().backward()
    router(FixedRouter).routing(without)[0].square().sum().backward()
    logits = LOGITS.clone().requires_grad_()
    (0.5 * torch.logsumexp(logits, -1).square().mean()).backward()
    torch.testing.assert_close(with_loss.grad - without.grad, logits.grad)

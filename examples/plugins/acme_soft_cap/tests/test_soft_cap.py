"""Scores are capped by the formula, in the layers that were asked for, and the fallback is told."""

import pytest

from mindspeed_core.activation import plan_for
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.testing.contract import contract_checks
from mindspeed_core.testing.model_flags import training_flags


def test_the_cap_has_slope_one_at_zero_and_never_passes_its_value():
    import torch

    from acme_soft_cap.attention import soft_cap

    scores = torch.tensor([0.0, 1e-3, -1e-3, 50.0, -1e9], dtype=torch.float64)
    capped = soft_cap(scores, 5.0)

    assert capped[0] == 0.0
    assert torch.allclose(capped[1:3], scores[1:3], rtol=1e-6)
    assert capped[3:].abs().max() <= 5.0


def attention_and_formula():
    """Capped attention of one layer of a real model, and the same by hand."""
    import math

    import torch
    from megatron.core.utils import unwrap_model

    from mindspeed_core import activate
    from mindspeed_core.hosts.standalone import loop

    flags = training_flags(["--acme-soft-cap", "0.01", "--acme-soft-cap-layers", "2"], 1)
    with activate(flags, host="standalone", platform="cpu") as session:
        run = loop.setup(session)
        (model,) = unwrap_model(run.model)
        classes = [type(layer.self_attention.core_attention).__name__ for layer in model.decoder.layers]
        query, key, value = torch.randn(3, 8, 1, 4, 16).unbind(0)
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
        attended = model.decoder.layers[1].self_attention.core_attention(query, key, value, mask)
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key) / math.sqrt(16)
        capped = (0.01 * torch.tanh(scores / 0.01)).masked_fill(mask, -10000.0)
        expected = torch.einsum("bnqk,kbnd->qbnd", capped.softmax(-1), value).reshape(8, 1, 64)
        error = float((attended - expected).abs().max())
        loop.teardown(session)
    return classes, error


def test_the_chosen_layer_computes_the_formula_and_the_others_are_left_alone(mindspeed_world):
    ((classes, error),) = mindspeed_world(attention_and_formula, 1)

    assert classes == ["DotProductAttention", "SoftCappedAttention", *["DotProductAttention"] * 2]
    assert error < 1e-6


def plan(*flags):
    return plan_for(training_flags(flags, 1), host="standalone", platform="cpu")[0]


def test_where_nothing_is_compiled_the_plain_cap_takes_over_with_the_reason():
    made = plan("--acme-soft-cap", "50", "--acme-soft-cap-compiled")

    assert made.names == ("acme-soft-cap",)
    (held,) = made.held_back
    assert "held in eager mode" in held.reason
    assert held.remedy == "nothing; acme-soft-cap takes over"


def test_a_compiled_cap_without_a_cap_is_refused_where_it_runs():
    from mindspeed_core.flags.flag_set import flag_set
    from mindspeed_core.registry import Registry
    from mindspeed_core.resolver.resolve import resolve

    registry = Registry.discover()
    parsed = flag_set(registry, "standalone").parse(training_flags(["--acme-soft-cap-compiled"], 1))
    with pytest.raises(PlanError, match="nothing to compile without a cap"):
        resolve(registry, parsed.args, provenance=parsed.provenance, platform="cuda")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--acme-soft-cap", "-1"), "is not above 0"),
        (("--acme-soft-cap", "5", "--acme-soft-cap-layers", "9"), "the model has layers 1 to 4"),
    ],
)
def test_values_that_cannot_work_are_refused(flags, words):
    with pytest.raises(PlanError, match=words):
        plan(*flags)


@pytest.mark.parametrize("check", contract_checks("acme-soft-cap", platform="cpu"), ids=str)
def test_the_contract_is_kept(check):
    check()

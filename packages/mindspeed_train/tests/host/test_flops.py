"""The formula of operations against torch's counter, and against numbers worked out by hand."""

from types import SimpleNamespace

import pytest

from mindspeed_megatron.flops import count_flops, uncounted
from mindspeed_testing import run_world

MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rope_type": "rope",
}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "gated_linear_unit": True,
}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
CASES = {
    "plain": {},
    "grouped heads": {"num_query_groups": 2, "kv_channels": 12},
    "gated mlp": {"gated_linear_unit": True, "ffn_hidden_size": 40},
    "experts": MOE,
    "experts in every second layer, a shared one": {
        **MOE,
        "moe_layer_freq": [0, 1, 0],
        "moe_shared_expert_intermediate_size": 20,
    },
    "latent attention": MLA,
    "latent attention without query rank": {**MLA, "q_lora_rank": None},
    "prediction layers": {"mtp_num_layers": 2},
    "full recompute": {**FULL, "recompute_method": "uniform"},
    "block recompute": {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
    "recomputed attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "recomputed experts": {**MOE, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "recomputed prediction": {**FULL, "recompute_method": "uniform", "mtp_num_layers": 1},
}


@pytest.fixture(scope="module")
def counted():
    (results,) = run_world("counted_models:counts", 1, list(CASES.values()))
    return dict(zip(CASES, results))


@pytest.mark.parametrize("case", CASES)
def test_the_formula_is_what_torch_counts(counted, case):
    executed, _, _, expected = counted[case]
    assert executed == expected.hardware
    assert expected.model < expected.hardware if "recompute" in case else expected.model == expected.hardware


@pytest.mark.parametrize("case", CASES)
def test_what_is_recomputed_is_told_apart_exactly(counted, case):
    _, needed, recomputed, expected = counted[case]
    assert (needed, recomputed) == (expected.model, expected.recomputed)


def shape(**changes):
    fields = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_query_groups": 2,
        "kv_channels": 4,
        "ffn_hidden_size": 32,
        "gated_linear_unit": False,
        "num_moe_experts": None,
        "recompute_granularity": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def test_a_causal_mask_halves_the_scores_and_nothing_else():
    whole = count_flops(shape(), seq_length=10, vocab_size=16, causal=False).forward
    masked = count_flops(shape(), seq_length=10, vocab_size=16).forward
    assert masked["attention scores"] == whole["attention scores"] / 2 == 2 * 4 * 50 * 8
    assert {k: v for k, v in masked.items() if "scores" not in k} == {
        k: v for k, v in whole.items() if "scores" not in k
    }


def test_a_window_counts_the_positions_it_leaves():
    windowed = shape(window_size=(3, 0), window_attn_skip_freq=[1, 0])
    scores = count_flops(windowed, seq_length=10, vocab_size=16).forward["attention scores"]
    assert scores == 4 * 8 * ((4 * 10 - 8) + 50)


def test_what_the_formula_does_not_cover_is_said():
    assert uncounted(shape()) == ""
    assert "hybrid" in uncounted(shape(is_hybrid_model=True))
    assert "gated_delta_net" in uncounted(shape(experimental_attention_variant="gated_delta_net"))

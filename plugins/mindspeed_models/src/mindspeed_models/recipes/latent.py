"""Rules and rows of multi-latent attention (DeepSeek-AI, 2024) in megatron-core's terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_models.config_file import NAME, Keys
from mindspeed_models.recipe import Config, ModelPlan, RecipeError
from mindspeed_models.recipes.decoder import ENDS, HF_LAYER, LAYER, dense, gated_mlp, routed, whole
from mindspeed_models.recipes.experts import expert_rows
from mindspeed_models.weights.table import Row, When

_MTP, _HF_MTP = "mtp.layers.{m}.", "model.layers.{L}."
_EVERY_EXPERT = ("mlp.gate", "mlp.experts")


def latent_arguments(keys: Keys) -> dict[str, Any]:
    """Return the flags of attention, experts and sizes, with all of yarn's defaults spelled out."""
    keys.only("hidden_act", "silu", reason="and gated layers here have silu")
    keys.only("attention_bias", False, reason="and published models have no biases")
    keys.only(
        "moe_layer_freq", 1, reason="and published models have experts in each layer after the first ones"
    )
    layers, dense_layers = keys.count("num_hidden_layers"), int(keys.get("first_k_dense_replace", default=0))
    heads, ffn = keys.count("num_attention_heads"), keys.count("moe_intermediate_size")
    shared = int(keys.get("n_shared_experts", default=0))
    return {
        "num_layers": layers,
        "hidden_size": keys.count("hidden_size"),
        "ffn_hidden_size": keys.count("intermediate_size"),
        "num_attention_heads": heads,
        "group_query_attention": False,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": keys.get("q_lora_rank"),
        "kv_lora_rank": keys.count("kv_lora_rank"),
        "qk_head_dim": keys.count("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": keys.count("qk_rope_head_dim"),
        "v_head_dim": keys.count("v_head_dim"),
        "normalization": "RMSNorm",
        "norm_epsilon": float(keys.get("rms_norm_eps", default=1e-6)),
        "swiglu": True,
        "add_bias_linear": False,
        **_positions(keys),
        "num_experts": keys.count("n_routed_experts", "num_local_experts", "num_experts"),
        "moe_router_topk": keys.count("num_experts_per_tok"),
        "moe_ffn_hidden_size": ffn,
        "moe_layer_freq": [int(layer >= dense_layers) for layer in range(layers)] if dense_layers else 1,
        "moe_router_topk_scaling_factor": float(keys.get("routed_scaling_factor", default=1.0)),
        **({"moe_shared_expert_intermediate_size": shared * ffn} if shared else {}),
        "vocab_size": keys.count("vocab_size"),
        "untie_embeddings_and_output_weights": not keys.get("tie_word_embeddings", default=False),
    }


def _positions(keys: Keys) -> dict[str, Any]:
    rope = keys.rope()
    found: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": whole(rope["rope_theta"], "rope_theta"),
        "rope_type": "rope",
    }
    if rope["rope_type"] == "default":
        return found
    if rope["rope_type"] != "yarn":
        raise RecipeError(
            f"{NAME}: rope scaling of type {rope['rope_type']!r} is not supported; default and yarn are"
        )
    return {
        **found,
        "rope_type": "yarn",
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": int(rope.get("original_max_position_embeddings") or 4096),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": float(rope.get("mscale") or 1.0),
        "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0),
    }


def latent_config(plan: ModelPlan, model_type: str, architecture: str) -> dict[str, Any]:
    """Return a ``config.json``, the way back of `latent_arguments`."""
    args = plan.arguments
    ffn = args["moe_ffn_hidden_size"]
    found = {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": plan.layers,
        "hidden_size": plan.hidden,
        "intermediate_size": args["ffn_hidden_size"],
        "num_attention_heads": plan.heads,
        "num_key_value_heads": plan.heads,
        "q_lora_rank": args.get("q_lora_rank"),
        "kv_lora_rank": args["kv_lora_rank"],
        "qk_nope_head_dim": args["qk_head_dim"],
        "qk_rope_head_dim": args["qk_pos_emb_head_dim"],
        "v_head_dim": args["v_head_dim"],
        "rms_norm_eps": args["norm_epsilon"],
        "rope_theta": float(args["rotary_base"]),
        "n_routed_experts": plan.experts,
        "num_experts_per_tok": args["moe_router_topk"],
        "moe_intermediate_size": ffn,
        "n_shared_experts": plan.value("moe_shared_expert_intermediate_size", 0) // ffn,
        "first_k_dense_replace": next((n for n in range(plan.layers) if plan.routed(n)), plan.layers),
        "routed_scaling_factor": args["moe_router_topk_scaling_factor"],
        "vocab_size": plan.vocabulary,
        "tie_word_embeddings": plan.tied,
        "max_position_embeddings": plan.defaults.get("max_position_embeddings", 4096),
    }
    if args.get("rope_type") == "yarn":
        names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        scaling = {name: args[name] for name in names}
        found["rope_scaling"] = {"type": "yarn", "factor": args["rotary_scaling_factor"], **scaling}
    return found


def _low_rank(plan: ModelPlan, layer: int) -> bool:
    return plan.value("q_lora_rank") is not None


def _full_rank(plan: ModelPlan, layer: int) -> bool:
    return not _low_rank(plan, layer)


def _has_shared(plan: ModelPlan, layer: int) -> bool:
    return bool(plan.value("moe_shared_expert_intermediate_size", 0))


def _shared(plan: ModelPlan, layer: int) -> bool:
    return plan.routed(layer) and _has_shared(plan, layer)


def _predicts(plan: ModelPlan, layer: int) -> bool:
    return plan.prediction_modules > 0


def _attention(mc: str, hf: str) -> tuple[Row, ...]:
    to, of = mc + "self_attention.", hf + "self_attn."

    def norm(name: str, up: str, source: str, when: When | None = None) -> Row:
        also = (f"{to}{name}.weight",)
        return Row(f"{to}{up}.layer_norm_weight", (f"{of}{source}.weight",), when=when, also=also)

    def copy(name: str, source: str, when: When | None = None) -> Row:
        return Row(f"{to}{name}.weight", (f"{of}{source}.weight",), when=when)

    return (
        Row(mc + "input_layernorm.weight", (hf + "input_layernorm.weight",)),
        copy("linear_q_proj", "q_proj", _full_rank),
        copy("linear_q_down_proj", "q_a_proj", _low_rank),
        norm("q_layernorm", "linear_q_up_proj", "q_a_layernorm", _low_rank),
        copy("linear_q_up_proj", "q_b_proj", _low_rank),
        copy("linear_kv_down_proj", "kv_a_proj_with_mqa"),
        norm("kv_layernorm", "linear_kv_up_proj", "kv_a_layernorm"),
        copy("linear_kv_up_proj", "kv_b_proj"),
        copy("linear_proj", "o_proj"),
    )


def _experts(mc: str, hf: str, when: When | None, shared: When, *, bias: bool) -> tuple[Row, ...]:
    rows = expert_rows(*_EVERY_EXPERT, mc=mc, hf=hf, when=when)
    if bias:
        rows += (Row(mc + "mlp.router.expert_bias", (hf + "mlp.gate.e_score_correction_bias",), when=when),)
    return (*rows, *gated_mlp(mc + "mlp.shared_experts.", hf + "mlp.shared_experts.", when=shared))


def latent_rows(*, bias: bool) -> tuple[Row, ...]:
    """Return the whole table; ``bias`` is whether routers have one (and modules that predict further on)."""
    norm = Row(
        LAYER + "mlp.linear_fc1.layer_norm_weight",
        (HF_LAYER + "post_attention_layernorm.weight",),
        when=dense,
        also=(LAYER + "pre_mlp_layernorm.weight",),
    )
    rows = (
        *ENDS,
        *_attention(LAYER, HF_LAYER),
        norm,
        *gated_mlp(LAYER + "mlp.", HF_LAYER + "mlp.", when=dense),
        *_experts(LAYER, HF_LAYER, routed, _shared, bias=bias),
    )
    return (*rows, *_predictions()) if bias else rows


def _predictions() -> tuple[Row, ...]:
    """Return the rows of modules that predict further on; files repeat embedding and output layer in each."""
    inner = _MTP + "transformer_layer."
    # These take the place of the plain rows with the same key.
    ends = (
        Row(
            "embedding.word_embeddings.weight",
            ("model.embed_tokens.weight",),
            when=_predicts,
            repeats=("model.layers.{L}.embed_tokens.weight",),
        ),
        Row(
            "output_layer.weight",
            ("lm_head.weight",),
            when=_predicts,
            repeats=("model.layers.{L}.shared_head.head.weight",),
        ),
    )
    plain = [
        Row(f"{_MTP}{name}.weight", (f"{_HF_MTP}{source}.weight",))
        for name, source in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("eh_proj", "eh_proj"),
            ("final_layernorm", "shared_head.norm"),
        )
    ]
    return (
        *ends,
        *plain,
        *_attention(inner, _HF_MTP),
        *_experts(inner, _HF_MTP, None, _has_shared, bias=True),
    )


YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
_SIZES = (
    "num_hidden_layers hidden_size intermediate_size num_attention_heads moe_intermediate_size vocab_size"
)
_LATENT = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
_ROUTED = "n_routed_experts num_experts_per_tok n_shared_experts first_k_dense_replace"


def latent_size(
    sizes: Sequence[int], experts: Sequence[int], latent: Sequence[int | None], **more: Any
) -> Config:
    """Return the ``config.json`` of one size."""
    found: dict[str, Any] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "rope_theta": 10000}
    for names, values in ((_SIZES, sizes), (_ROUTED, experts), (_LATENT, latent)):
        found.update(zip(names.split(), values))
    return {**found, **more}

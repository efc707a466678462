"""Bloom of BigScience: LayerNorm, linear biases as positions, a norm of the embedding."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import LAYER
from mindspeed_models.weights.table import BloomQKV, Row


def _plan(config: Config) -> ModelPlan:
    keys = Keys(config)
    keys.only("apply_residual_connection_post_layernorm", False, reason="and published models have false")
    hidden, heads = keys.count("hidden_size", "n_embed"), keys.count("n_head", "num_attention_heads")
    arguments = {
        "num_layers": keys.count("n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": heads,
        "kv_channels": hidden // heads,
        "normalization": "LayerNorm",
        "norm_epsilon": float(keys.get("layer_norm_epsilon", default=1e-5)),
        **dict.fromkeys(("add_bias_linear", "embed_layernorm"), True),
        **dict.fromkeys(("swiglu", "group_query_attention", "untie_embeddings_and_output_weights"), False),
        "position_embedding_type": "alibi",
        "vocab_size": keys.count("vocab_size"),
    }
    defaults = {
        **{name: float(config.get(name) or 0.0) for name in ("attention_dropout", "hidden_dropout")},
        "init_method_std": float(config.get("initializer_range") or 0.02),
        "max_position_embeddings": keys.count("seq_length", default=2048),
    }
    return ModelPlan("bloom", arguments, defaults)


def _config(plan: ModelPlan) -> dict[str, Any]:
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "n_layer": plan.layers,
        "hidden_size": plan.hidden,
        "n_head": plan.heads,
        "vocab_size": plan.vocabulary,
        "layer_norm_epsilon": plan.arguments["norm_epsilon"],
    }


def _pairs(mc: str, hf: str, mark: str = ".") -> tuple[Row, ...]:
    """Return the rows of weight and bias."""
    return tuple(Row(f"{mc}{mark}{each}", (f"{hf}.{each}",), BloomQKV()) for each in ("weight", "bias"))


_H = "transformer.h.{l}."
_QKV, _FC1 = LAYER + "self_attention.linear_qkv", LAYER + "mlp.linear_fc1"
ROWS = (
    Row("embedding.word_embeddings.weight", ("transformer.word_embeddings.weight",)),
    *_pairs("embedding.norm", "transformer.word_embeddings_layernorm"),
    *_pairs(_QKV, _H + "input_layernorm", ".layer_norm_"),
    *_pairs(_QKV, _H + "self_attention.query_key_value"),
    *_pairs(LAYER + "self_attention.linear_proj", _H + "self_attention.dense"),
    *_pairs(_FC1, _H + "post_attention_layernorm", ".layer_norm_"),
    *_pairs(_FC1, _H + "mlp.dense_h_to_4h"),
    *_pairs(LAYER + "mlp.linear_fc2", _H + "mlp.dense_4h_to_h"),
    *_pairs("decoder.final_layernorm", "transformer.ln_f"),
)
BLOOM = Recipe(
    name="bloom",
    summary="Bloom: linear biases as positions, a norm of the embedding, tied output",
    model_types=("bloom",),
    plan=_plan,
    config=_config,
    rows=ROWS,
    sizes={
        "tiny": {"n_layer": 2, "hidden_size": 64, "n_head": 4, "vocab_size": 256, "seq_length": 256},
        "7b1": {"n_layer": 30, "hidden_size": 4096, "n_head": 32, "vocab_size": 250880},
        "176b": {"n_layer": 70, "hidden_size": 14336, "n_head": 112, "vocab_size": 250880},
    },
    prefix="transformer.",
)
RECIPES = (BLOOM,)

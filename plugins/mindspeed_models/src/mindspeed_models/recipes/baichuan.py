"""Baichuan and Baichuan2: query, key and value in one matrix; positions as rotations (7B) or biases (13B)."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import (
    DECODER,
    PACKED,
    decoder_arguments,
    decoder_config,
    decoder_size,
    training_defaults,
)

_ROTARY = ("rotary_base", "use_rope_scaling", "rotary_percent", "rotary_seq_len_interpolation_factor")
_NORMALIZED_FROM = 100000
"""Baichuan2 has this many tokens and more, and its normalized output layer; the first version has 64,000."""
_ROWS = tuple(PACKED if "linear_qkv.weight" in row.mc else row for row in DECODER)


def _plan(config: Config) -> ModelPlan:
    keys = Keys(config)
    # 13B files give the length that the biases were trained for, and no other sign of them.
    biased = config.get("model_max_length") is not None and config.get("max_position_embeddings") is None
    arguments = decoder_arguments(config)
    if biased or keys.get("position_embedding", default="").lower() == "alibi":
        arguments = {name: value for name, value in arguments.items() if name not in _ROTARY}
        arguments["position_embedding_type"] = "alibi"
    defaults = training_defaults(config)
    defaults["max_position_embeddings"] = keys.count(
        "max_position_embeddings", "model_max_length", default=4096
    )
    if keys.get("normalized_head", default=arguments["vocab_size"] >= _NORMALIZED_FROM):
        arguments["lm_norm_weight"] = True
    return ModelPlan("baichuan", arguments, defaults)


def _config(plan: ModelPlan) -> dict[str, Any]:
    found = {"rotary_base": 10000, **plan.arguments}
    config = decoder_config(plan.replaced(found), "baichuan", "BaichuanForCausalLM")
    config["normalized_head"] = bool(plan.value("lm_norm_weight", False))
    if plan.arguments["position_embedding_type"] == "alibi":
        del config["rope_theta"]
        config["model_max_length"] = config.pop("max_position_embeddings")
    return config


_7B, _13B = (32, 4096, 11008, 32, 32), (40, 5120, 13696, 40, 40)
BAICHUAN = Recipe(
    name="baichuan",
    summary="Baichuan: q, k, v in one matrix; biases in place of rotary positions in 13B",
    model_types=("baichuan",),
    plan=_plan,
    config=_config,
    rows=_ROWS,
    sizes={
        "tiny": decoder_size(2, 64, 176, 4, 4, 256, max_position_embeddings=256),
        "7b": decoder_size(*_7B, 64000, max_position_embeddings=4096),
        "13b": decoder_size(*_13B, 64000, model_max_length=4096),
    },
    chat_template="baichuan",
)
BAICHUAN2 = Recipe(
    name="baichuan2",
    summary="Baichuan2: logits from normalized rows of the output layer",
    plan=_plan,
    config=_config,
    rows=_ROWS,
    sizes={
        "tiny": decoder_size(2, 64, 176, 4, 4, 256, max_position_embeddings=256, normalized_head=True),
        "7b": decoder_size(*_7B, 125696, max_position_embeddings=4096),
        "13b": decoder_size(*_13B, 125696, model_max_length=4096),
    },
    chat_template="baichuan",
)
RECIPES = (BAICHUAN, BAICHUAN2)

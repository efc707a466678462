"""Gemma of Google: gated tanh-GELU, norms around one, an embedding that is scaled."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import DECODER, decoder_arguments, decoder_config, training_defaults

_TANH = ("gelu_pytorch_tanh", "gelu", None)


def _plan(config: Config) -> ModelPlan:
    keys = Keys(config)
    # Older files say gelu in hidden_act; the published model computes the tanh form all the same.
    found = keys.get("hidden_activation", "hidden_act")
    if found not in _TANH:
        keys.refuse("hidden_act", "and this family has gelu_pytorch_tanh")
    known = {name: value for name, value in config.items() if name not in ("hidden_act", "hidden_activation")}
    arguments = {
        **decoder_arguments({"head_dim": 256, **known}, tied=True),
        "swiglu": False,
        "geglu": True,
        "apply_layernorm_1p": True,
        "scale_embedding": True,
    }
    return ModelPlan("gemma", arguments, training_defaults(config))


def _config(plan: ModelPlan) -> dict[str, Any]:
    found = decoder_config(plan, "gemma", "GemmaForCausalLM")
    return {**found, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _size(layers: int, hidden: int, ffn: int, heads: int, groups: int, **more: Any) -> Config:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": 256,
        "vocab_size": 256000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        **more,
    }


GEMMA = Recipe(
    name="gemma",
    summary="Gemma 1: gated tanh-GELU, scaled embedding",
    model_types=("gemma",),
    plan=_plan,
    config=_config,
    rows=DECODER,
    sizes={
        "tiny": _size(2, 64, 176, 4, 2, head_dim=16, vocab_size=256, max_position_embeddings=256),
        "2b": _size(18, 2048, 16384, 8, 1),
        "7b": _size(28, 3072, 24576, 16, 16),
    },
    chat_template="gemma",
)
_REASON = "layers alternate between a window and all tokens, with four norms each and limited logits"
GEMMA2 = Recipe(name="gemma2", model_types=("gemma2",), refused=_REASON)
GEMMA3 = Recipe(
    name="gemma3",
    model_types=("gemma3", "gemma3_text"),
    refused="layers alternate between a window and all tokens, with two kinds of positions and four norms",
)
RECIPES = (GEMMA, GEMMA2, GEMMA3)

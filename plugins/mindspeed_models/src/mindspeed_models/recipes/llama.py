"""LLaMA, Llama 2 and Llama 3.x of Meta."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import DECODER, decoder_arguments, decoder_config, training_defaults


def _plan(config: Config) -> ModelPlan:
    keys = Keys(config)
    for name in ("attention_bias", "mlp_bias"):
        keys.only(name, False, reason="and models of Meta have no biases; use the family internlm for those of q, k, v, o")
    keys.only("pretraining_tp", *range(1, 65), reason="which is no number of parts")
    return ModelPlan("llama", decoder_arguments(config), training_defaults(config))


def _config(plan: ModelPlan) -> dict[str, Any]:
    return decoder_config(plan, "llama", "LlamaForCausalLM")


def _size(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, **more: Any) -> Config:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        **more,
    }


def _llama3(factor: float) -> dict[str, Any]:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaled = {"rope_scaling": {"rope_type": "llama3", "factor": factor, **scaling}} if factor else {}
    longest = 131072 if factor else 8192
    return {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_position_embeddings": longest, **scaled}


_ONE = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_TWO = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_TINY = _size(2, 64, 176, 4, 2, 256, rms_norm_eps=1e-6, max_position_embeddings=256)
_SMALL = {**_llama3(32.0), "tie_word_embeddings": True}

LLAMA = Recipe(
    name="llama",
    summary="LLaMA: RMSNorm, rotary positions, SwiGLU",
    model_types=("llama",),
    plan=_plan,
    config=_config,
    rows=DECODER,
    sizes={
        "tiny": _TINY,
        "7b": _size(32, 4096, 11008, 32, 32, 32000, **_ONE),
        "13b": _size(40, 5120, 13824, 40, 40, 32000, **_ONE),
        "33b": _size(60, 6656, 17920, 52, 52, 32000, **_ONE),
        "65b": _size(80, 8192, 22016, 64, 64, 32000, **{**_ONE, "rms_norm_eps": 1e-5}),
    },
)
LLAMA2 = Recipe(
    name="llama2",
    summary="Llama 2, with query groups in its larger sizes",
    plan=_plan,
    config=_config,
    rows=DECODER,
    sizes={
        "tiny": _TINY,
        "7b": _size(32, 4096, 11008, 32, 32, 32000, **_TWO),
        "13b": _size(40, 5120, 13824, 40, 40, 32000, **_TWO),
        "34b": _size(48, 8192, 22016, 64, 8, 32000, **_TWO),
        "70b": _size(80, 8192, 28672, 64, 8, 32000, **_TWO),
    },
    chat_template="llama2",
)
LLAMA3 = Recipe(
    name="llama3",
    summary="Llama 3, 3.1, 3.2 and 3.3",
    plan=_plan,
    config=_config,
    rows=DECODER,
    sizes={
        "tiny": {**_TINY, **_llama3(8.0), "max_position_embeddings": 256},
        "8b": _size(32, 4096, 14336, 32, 8, 128256, **_llama3(0)),
        "70b": _size(80, 8192, 28672, 64, 8, 128256, **_llama3(0)),
        "3.1-8b": _size(32, 4096, 14336, 32, 8, 128256, **_llama3(8.0)),
        "3.1-70b": _size(80, 8192, 28672, 64, 8, 128256, **_llama3(8.0)),
        "3.1-405b": _size(126, 16384, 53248, 128, 8, 128256, **_llama3(8.0)),
        "3.2-1b": _size(16, 2048, 8192, 32, 8, 128256, **_SMALL, head_dim=64),
        "3.2-3b": _size(28, 3072, 8192, 24, 8, 128256, **_SMALL, head_dim=128),
    },
    chat_template="llama3",
)
RECIPES = (LLAMA, LLAMA2, LLAMA3)

"""Mistral and Mixtral of Mistral AI."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import DECODER, decoder_arguments, decoder_config, training_defaults
from mindspeed_models.recipes.experts import expert_arguments, expert_defaults, expert_rows


def _arguments(config: Config) -> dict[str, Any]:
    found = decoder_arguments(config)
    width = config.get("sliding_window")
    if width is not None:
        # A query and the w - 1 tokens before it, as transformers counts.
        found["window_size"] = (int(width) - 1, 0)
    return found


def _mistral(config: Config) -> ModelPlan:
    return ModelPlan("mistral", _arguments(config), training_defaults(config))


def _mixtral(config: Config) -> ModelPlan:
    keys = Keys(config)
    experts = expert_arguments(keys, ffn="intermediate_size", normalized=True)
    defaults = {**training_defaults(config), **expert_defaults(keys)}
    return ModelPlan("mixtral", {**_arguments(config), **experts}, defaults)


def _mistral_config(plan: ModelPlan) -> dict[str, Any]:
    window = plan.value("window_size")
    width = None if window is None else window[0] + 1
    return {**decoder_config(plan, "mistral", "MistralForCausalLM"), "sliding_window": width}


def _mixtral_config(plan: ModelPlan) -> dict[str, Any]:
    window = plan.value("window_size")
    return {
        **decoder_config(plan, "mixtral", "MixtralForCausalLM"),
        "intermediate_size": plan.arguments["moe_ffn_hidden_size"],
        "num_local_experts": plan.experts,
        "num_experts_per_tok": plan.arguments["moe_router_topk"],
        "sliding_window": None if window is None else window[0] + 1,
    }


_NAMES = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size".split()


def _size(*sizes: int, theta: float = 1e6, longest: int = 32768, **more: Any) -> Config:
    common = {"rms_norm_eps": 1e-5, "rope_theta": theta, "max_position_embeddings": longest}
    return {**dict(zip(_NAMES, sizes)), **common, **more}


MISTRAL = Recipe(
    name="mistral",
    summary="Mistral: query groups, in its first version a sliding window",
    model_types=("mistral",),
    plan=_mistral,
    config=_mistral_config,
    rows=DECODER,
    sizes={
        "tiny": _size(2, 64, 176, 4, 2, 256, longest=256),
        "7b": _size(32, 4096, 14336, 32, 8, 32768),
        "7b-v0.1": _size(32, 4096, 14336, 32, 8, 32000, theta=1e4, sliding_window=4096),
        "nemo-12b": _size(40, 5120, 14336, 32, 8, 131072, head_dim=128, longest=131072),
    },
    chat_template="mistral",
)
MIXTRAL = Recipe(
    name="mixtral",
    summary="Mixtral: Mistral with eight experts, of which two see a token",
    model_types=("mixtral",),
    plan=_mixtral,
    config=_mixtral_config,
    rows=(*DECODER, *expert_rows("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"))),
    sizes={
        "tiny": _size(2, 64, 96, 4, 2, 256, longest=256, num_local_experts=4, num_experts_per_tok=2),
        "8x7b": _size(32, 4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
        "8x22b": _size(
            56, 6144, 16384, 48, 8, 32768, num_local_experts=8, num_experts_per_tok=2, longest=65536
        ),
    },
    chat_template="mistral",
)
RECIPES = (MISTRAL, MIXTRAL)

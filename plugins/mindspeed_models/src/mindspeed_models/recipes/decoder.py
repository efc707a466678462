"""Rules and rows that decoders in the manner of LLaMA share; families differ by what they add.

A rule goes from ``config.json`` to flags, `decoder_config` goes back. ``rows`` names tensors as hubs do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_models.config_file import NAME, Keys
from mindspeed_models.recipe import Config, ModelPlan, RecipeError
from mindspeed_models.weights.table import QKV, Cat, Row, When, WPack

LAYER, HF_LAYER = "decoder.layers.{l}.", "model.layers.{l}."
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def decoder_arguments(config: Config, *, tied: bool = False) -> dict[str, Any]:
    """Return the flags of a decoder with RMSNorm, rotary positions and a gated MLP.

    Args:
        config: content of ``config.json``.
        tied: whether embedding and output layer are one where the file does not say, by type of model.
    """
    keys = Keys(config)
    heads = keys.count("num_attention_heads")
    hidden = keys.count("hidden_size")
    groups = keys.count("num_key_value_heads", default=heads)
    if heads % groups:
        keys.refuse("num_key_value_heads", f"which does not divide the {heads} heads")
    keys.only("hidden_act", "silu", reason="and gated layers here have silu")
    return {
        "num_layers": keys.count("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": keys.count("intermediate_size"),
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": groups,
        "kv_channels": keys.count("head_dim", default=max(hidden // heads, 1)),
        "normalization": "RMSNorm",
        "norm_epsilon": float(keys.get("rms_norm_eps", default=1e-6)),
        "swiglu": True,
        "add_bias_linear": False,
        **rotary(keys),
        "vocab_size": keys.count("vocab_size"),
        "untie_embeddings_and_output_weights": not keys.get("tie_word_embeddings", default=tied),
    }


def training_defaults(config: Config) -> dict[str, Any]:
    """Return what the family trains with and any flag may change."""
    return {
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        "hidden_dropout": 0.0,
        "init_method_std": float(config.get("initializer_range") or 0.02),
        # Rotary positions and linear biases have no weights: sequences may be shorter or longer.
        "max_position_embeddings": Keys(config).count("max_position_embeddings", default=2048),
    }


def rotary(keys: Keys) -> dict[str, Any]:
    """Return the flags of rotary positions: plain, or scaled as Llama 3.1 does.

    Raises:
        RecipeError: another scaling.
    """
    rope = keys.rope()
    found: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": whole(rope["rope_theta"], "rope_theta"),
        "use_rope_scaling": False,
    }
    kind = rope["rope_type"]
    if kind == "linear":
        found["rotary_seq_len_interpolation_factor"] = whole(rope["factor"], "rope_scaling.factor")
    elif kind == "llama3":
        wrong = [name for name, value in LLAMA3_SCALING.items() if rope.get(name) != value]
        if wrong:
            raise RecipeError(
                f"{NAME}: rope scaling has {wrong[0]} {rope.get(wrong[0])!r}; megatron-core scales with "
                f"{LLAMA3_SCALING[wrong[0]]:g} only"
            )
        found |= {"use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    elif kind != "default":
        raise RecipeError(
            f"{NAME}: rope scaling of type {kind!r} is not supported; default, linear, llama3 are"
        )
    if rope.get("partial_rotary_factor"):
        found["rotary_percent"] = float(rope["partial_rotary_factor"])
    return found


def whole(value: float, name: str) -> int:
    """Return a number that Megatron's flag takes as an integer.

    Raises:
        RecipeError: it is none.
    """
    if value != int(value):
        raise RecipeError(f"{NAME}: {name} is {value!r}; megatron-core takes whole numbers only")
    return int(value)


def decoder_config(plan: ModelPlan, model_type: str, architecture: str) -> dict[str, Any]:
    """Return a ``config.json`` of a decoder, the way back of `decoder_arguments`."""
    args = plan.arguments
    found = {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": plan.layers,
        "hidden_size": plan.hidden,
        "intermediate_size": args["ffn_hidden_size"],
        "num_attention_heads": plan.heads,
        "num_key_value_heads": plan.groups,
        "head_dim": plan.head_dim,
        "rms_norm_eps": args["norm_epsilon"],
        "hidden_act": "silu",
        "rope_theta": float(args["rotary_base"]),
        "max_position_embeddings": plan.defaults.get("max_position_embeddings", 2048),
        "vocab_size": plan.vocabulary,
        "tie_word_embeddings": plan.tied,
        "initializer_range": plan.defaults.get("init_method_std", 0.02),
    }
    if args.get("use_rope_scaling"):
        found["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": args["rope_scaling_factor"],
            **LLAMA3_SCALING,
        }
    elif args.get("rotary_seq_len_interpolation_factor"):
        factor = float(args["rotary_seq_len_interpolation_factor"])
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return found


def untied(plan: ModelPlan, layer: int) -> bool:
    """Return whether the output layer has weights of its own."""
    return not plan.tied


def dense(plan: ModelPlan, layer: int) -> bool:
    """Return whether a layer has one MLP."""
    return not plan.routed(layer)


def routed(plan: ModelPlan, layer: int) -> bool:
    """Return whether a layer has routed experts."""
    return plan.routed(layer)


ENDS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",), when=untied),
)
"""Embedding, last norm, and output layer where it is not the embedding."""

# megatron-core's layers of either kind save norms under these names, with the linear layer behind them.
INPUT_NORM = Row(
    LAYER + "self_attention.linear_qkv.layer_norm_weight", (HF_LAYER + "input_layernorm.weight",)
)
MLP_NORM = Row(
    LAYER + "mlp.linear_fc1.layer_norm_weight", (HF_LAYER + "post_attention_layernorm.weight",), when=dense
)
OUTPUT = Row(LAYER + "self_attention.linear_proj.weight", (HF_LAYER + "self_attn.o_proj.weight",))
PACKED = Row(LAYER + "self_attention.linear_qkv.weight", (HF_LAYER + "self_attn.W_pack.weight",), WPack())


def joined(parameter: str) -> Row:
    """Return the row of the joint query, key and value: ``weight`` or ``bias``."""
    sources = tuple(f"{HF_LAYER}self_attn.{name}_proj.{parameter}" for name in "qkv")
    return Row(f"{LAYER}self_attention.linear_qkv.{parameter}", sources, QKV())


def gated_mlp(
    mc: str, hf: str, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"), when: When | None = None
) -> tuple[Row, ...]:
    """Return the rows of a gated MLP between two prefixes; ``names`` are gate, up and down."""
    gate, up, down = (f"{hf}{name}.weight" for name in names)
    return (
        Row(mc + "linear_fc1.weight", (gate, up), Cat(), when),
        Row(mc + "linear_fc2.weight", (down,), when=when),
    )


MLP = gated_mlp(LAYER + "mlp.", HF_LAYER + "mlp.", when=dense)

DECODER: tuple[Row, ...] = (*ENDS, INPUT_NORM, MLP_NORM, joined("weight"), OUTPUT, *MLP)
"""The rows of LLaMA."""


QK_NORMS = tuple(
    Row(f"{LAYER}self_attention.{x}_layernorm.weight", (f"{HF_LAYER}self_attn.{x}_norm.weight",))
    for x in "qk"
)
"""Norms of query and key per head."""


def decoder_size(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, **more: Any
) -> Config:
    """Return the ``config.json`` of one size."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        **more,
    }

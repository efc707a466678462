"""Model and library versions of a checkpoint, compared with those of the run that resumes it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

MODEL_ARGUMENTS = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention "
    "num_query_groups vocab_size make_vocab_size_divisible_by padded_vocab_size max_position_embeddings "
    "position_embedding_type normalization swiglu add_bias_linear add_qkv_bias qk_layernorm "
    "multi_latent_attention untie_embeddings_and_output_weights num_experts moe_ffn_hidden_size"
).split()
"""Arguments that decide which tensors a model has and their shapes."""


def model_arguments(args: Namespace) -> dict[str, Any]:
    """Return the arguments of the model, for the manifest."""
    values = {name: getattr(args, name, None) for name in MODEL_ARGUMENTS}
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}


def compare_models(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """List the flags that differ, ``--name VALUE (checkpoint) / VALUE (this run)`` each."""
    return [
        f"--{name.replace('_', '-')} {saved.get(name)} (checkpoint) / {current.get(name)} (this run)"
        for name in MODEL_ARGUMENTS
        if saved.get(name) != current.get(name)
    ]


def compare_versions(saved: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """List the libraries whose version differs, one phrase each."""
    return [
        f"{name} {saved[name]} then, {current[name]} now"
        for name in sorted(saved.keys() & current.keys())
        if saved[name] != current[name]
    ]

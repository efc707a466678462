"""The matrices of adapters, for the count of a step's operations."""

from __future__ import annotations

from typing import Any

from mindspeed_megatron.partial_training import PartialTraining
from mindspeed_models.lora.options import LoraOptions
from mindspeed_models.lora.targets import OUTPUT

_LOGITS = "logits"


def partial_training(options: LoraOptions, config: Any, vocabulary: int, *, tied: bool) -> PartialTraining:
    """Return what trains beside a frozen base.

    Args:
        options: of the adapters.
        config: of the model.
        vocabulary: rows of the output layer.
        tied: the output layer's weight is the embedding's.
    """
    added: dict[str, int] = {}
    for role in options.roles:
        part = _LOGITS if role == OUTPUT else "mlp" if role in ("fc1", "fc2") else "attention projections"
        rank = options.ranks.get(role, options.rank)
        added[part] = added.get(part, 0) + rank * sum(_sizes(role, config, vocabulary))
    trained = {"router"}.intersection(options.modules)
    if OUTPUT in options.modules or (tied and "word_embeddings" in options.modules):
        trained.add(_LOGITS)
    return PartialTraining(frozenset(trained), added)


def _sizes(role: str, config: Any, vocabulary: int) -> tuple[int, int]:
    """Return the inputs and outputs of a linear over all ranks."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if role == OUTPUT:
        return hidden, vocabulary
    if role == "fc1":
        return hidden, config.ffn_hidden_size * (2 if config.gated_linear_unit else 1)
    if role == "fc2":
        return config.ffn_hidden_size, hidden
    if not config.multi_latent_attention:
        queries = heads * config.kv_channels
        if role == "proj":
            return queries, hidden
        groups = (config.num_query_groups or heads) * config.kv_channels
        gate = queries if getattr(config, "attention_output_gate", False) else 0
        return hidden, queries + 2 * groups + gate
    scores = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    return {
        "proj": (heads * config.v_head_dim, hidden),
        "q_proj": (hidden, scores),
        "q_down_proj": (hidden, config.q_lora_rank or 0),
        "q_up_proj": (config.q_lora_rank or 0, scores),
        "kv_down_proj": (hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim),
        "kv_up_proj": (config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim)),
    }[role]

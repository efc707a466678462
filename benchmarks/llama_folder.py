"""A Hugging Face folder of a LLaMA with random weights, for benchmarks of what is done with a model."""

from __future__ import annotations

from pathlib import Path


def write_llama(folder: Path, layers: int, width: int, vocabulary: int) -> None:
    """Write a LLaMA of that size, without tokens that begin or end a text."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=int(width * 2.75),
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        eos_token_id=None,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)

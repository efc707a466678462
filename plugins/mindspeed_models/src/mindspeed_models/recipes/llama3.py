"""Llama 3, 3.1, 3.2 and 3.3 of Meta."""

from __future__ import annotations

from typing import Any

from mindspeed_models.recipe import Recipe
from mindspeed_models.recipes.decoder import DECODER, LLAMA3_SCALING, decoder_size
from mindspeed_models.recipes.llama import llama_config, llama_plan


def _llama3(factor: float) -> dict[str, Any]:
    scaled = {"rope_scaling": {"rope_type": "llama3", "factor": factor, **LLAMA3_SCALING}} if factor else {}
    longest = 131072 if factor else 8192
    return {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_position_embeddings": longest, **scaled}


_SMALL = {**_llama3(32.0), "tie_word_embeddings": True}
LLAMA3 = Recipe(
    name="llama3",
    summary="Llama 3, 3.1, 3.2 and 3.3",
    plan=llama_plan,
    config=llama_config,
    rows=DECODER,
    sizes={
        "tiny": {**decoder_size(2, 64, 176, 4, 2, 256), **_llama3(8.0), "max_position_embeddings": 256},
        "8b": decoder_size(32, 4096, 14336, 32, 8, 128256, **_llama3(0)),
        "70b": decoder_size(80, 8192, 28672, 64, 8, 128256, **_llama3(0)),
        "3.1-8b": decoder_size(32, 4096, 14336, 32, 8, 128256, **_llama3(8.0)),
        "3.1-70b": decoder_size(80, 8192, 28672, 64, 8, 128256, **_llama3(8.0)),
        "3.1-405b": decoder_size(126, 16384, 53248, 128, 8, 128256, **_llama3(8.0)),
        "3.2-1b": decoder_size(16, 2048, 8192, 32, 8, 128256, **_SMALL, head_dim=64),
        "3.2-3b": decoder_size(28, 3072, 8192, 24, 8, 128256, **_SMALL, head_dim=128),
    },
    chat_template="llama3",
)
RECIPES = (LLAMA3,)

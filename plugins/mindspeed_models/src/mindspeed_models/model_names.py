"""Names that flags of models take; declarations read them without a recipe."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_core.discovery.extensions import installed_extensions
from mindspeed_models.extension_points import RECIPES

OVERRIDE = "--override-model-config"
CONFIG_FILE = "config.json"
BUILT_IN: Mapping[str, tuple[str, ...]] = {
    "llama": ("llama", "llama2"),
    "llama3": ("llama3",),
    "qwen2": ("qwen2", "qwen2.5"),
    "qwen3": ("qwen3",),
    "qwen_moe": ("qwen3-moe",),
    "mistral": ("mistral",),
    "mixtral": ("mixtral",),
    "deepseek_v2": ("deepseek-v2",),
    "deepseek_v3": ("deepseek-v3",),
    "gemma": ("gemma",),
    "aquila": ("aquila",),
    "baichuan": ("baichuan", "baichuan2"),
    "bloom": ("bloom",),
    "internlm": ("internlm",),
}
"""Modules of `mindspeed_models.recipes`, and the families in them that are supported."""


def family_names() -> list[str]:
    """Return the names of families for a help text; no recipe is imported for it."""
    own = [name for names in BUILT_IN.values() for name in names]
    return [*own, *(name for name in installed_extensions(RECIPES).names() if name not in own)]

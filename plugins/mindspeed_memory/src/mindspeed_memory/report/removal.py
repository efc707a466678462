"""Flags that take a tensor off the device, or make it smaller."""

from __future__ import annotations

from mindspeed_megatron.instruments.storage import (
    ACTIVATIONS,
    GRADIENTS,
    MAIN_PARAMETERS,
    OPTIMIZER_STATE,
    PARAMETERS,
)

_BY_KIND = {
    PARAMETERS: "--tensor-model-parallel-size, --pipeline-model-parallel-size",
    GRADIENTS: "--grad-reduce-in-bf16 halves it, with --release-fp32-grad in the update too",
    MAIN_PARAMETERS: "--swap-optimizer, or --reuse-fp32-param for half of it",
    OPTIMIZER_STATE: "--swap-optimizer, --virtual-optimizer or --compress-optimizer",
}
_BY_PART = (
    ("layernorm", "--recompute-norm"),
    ("self_attention", "--swap-attention"),
    ("linear_fc1", "--compress-dense, or --recompute-plan"),
    ("experts", "--recompute-activation-function, or --recompute-plan"),
    ("mlp", "--recompute-activation-function"),
    ("layers", "--recompute-granularity full"),
)
_NOTHING = "no flag of this package"


def removed_by(kind: str, module: str) -> str:
    """Return the flags that remove a tensor, or a part of it.

    Args:
        kind: its use, of `mindspeed_megatron.instruments.storage`.
        module: qualified name of the module that made it.
    """
    if kind != ACTIVATIONS:
        return _BY_KIND.get(kind, _NOTHING)
    parts = module.split(".")
    for word, flags in _BY_PART:
        if "layers" in parts and any(word in part for part in parts):
            return flags
    return _NOTHING

"""Checkpoints that change hands with Megatron-LM, in its ``torch_dist`` format.

Both programs describe model and optimizer by megatron-core's own keys, so tensors need no translation. What
differs is beside them: Megatron-LM keeps counters and sizes in its ``args``, and has no manifest. This module
writes the part of ``args`` that its loader reads, and reads it back.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_core.run import Run

_COUNTERS = ("consumed_train_samples", "consumed_valid_samples")
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}
_ALSO = (
    "num_layers hidden_size num_attention_heads max_position_embeddings add_position_embedding "
    "make_vocab_size_divisible_by padded_vocab_size tokenizer_type world_size no_save_optim no_save_rng "
    "use_distributed_optimizer ckpt_fully_parallel_save"
).split()


def arguments(run: Run, sizes: Mapping[str, int]) -> Namespace:
    """Return what Megatron-LM's loader reads from ``args``: sizes, the model's shape and the counters.

    Only numbers, strings and switches; `argparse.Namespace` itself has no behaviour. ``sizes`` are those of
    the parallel dimensions, by short name.
    """
    values: dict[str, Any] = {name: sizes[short] for short, name in _SIZES.items()}
    for name in _ALSO:
        value = getattr(run.args, name, None)
        if isinstance(value, (bool, int, float, str)):
            values[name] = value
    # Its loader compares them with its own flags; both are off unless their features are in use.
    values.setdefault("add_position_embedding", True)
    values.setdefault("tokenizer_type", None)
    values.update({name: getattr(run, name) for name in _COUNTERS})
    values["skipped_train_samples"] = 0
    return Namespace(**values)


def with_arguments(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return common state with counters and layout, wherever the writing program keeps them."""
    found = dict(common)
    args = found.get("args")
    if args is None:
        return found
    for name in _COUNTERS:
        found.setdefault(name, int(getattr(args, name, 0) or 0))
    found.setdefault("layout", {short: int(getattr(args, name, 1) or 1) for short, name in _SIZES.items()})
    return found

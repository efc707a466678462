"""Losses of experts that megatron-core collects by layer while micro-batches run, in either record."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe import moe_utils
from torch import Tensor


def take_expert_losses() -> dict[str, Tensor]:
    """Return the collected losses ``[layers]`` by name, and begin anew."""
    # From 0.18 on the dictionary of earlier versions is a copy, which forgets nothing.
    record: Any = getattr(moe_utils, "get_moe_metrics_tracker", None)
    if record is not None:
        metrics = record().metrics
        found = {name: entry.values for name, entry in metrics.items()}
    else:
        metrics = moe_utils.get_moe_layer_wise_logging_tracker()
        found = {name: entry["values"] for name, entry in metrics.items() if "values" in entry}
    metrics.clear()
    return found

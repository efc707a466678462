"""The options of a layer of experts, from the arguments of all active features; no torch."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

OVERLAPS = ("moe-alltoall-overlap", "moe-allgather-overlap")
"""Features that compute while tokens travel."""
DISABLED, LEVEL0, LEVEL1, ACTIVATION = "disable", "level0", "level1", "activation"
"""Activations of experts kept for backward: all; the first product's result; none; all but the activation
function's."""


@dataclass(frozen=True)
class LayerOptions:
    """Options of layers of experts: their communication, and the activations that they keep.

    Attributes:
        overlaps: shared experts and weight gradients are computed while tokens travel.
        saves: `DISABLED`, `LEVEL0` or `LEVEL1`.
        saving_layers: of each pipeline stage, so many layers save like that, the others their activation;
            None for all.
    """

    overlaps: bool
    saves: str = DISABLED
    saving_layers: int | None = None

    def of_layer(self, position: int, chunk: int, chunks: int) -> str:
        """Return what one layer keeps.

        Args:
            position: of the layer in its model chunk, from 0.
            chunk: virtual pipeline stage of the chunk.
            chunks: virtual pipeline stages of a rank.
        """
        if self.saves == DISABLED or self.saving_layers is None:
            return self.saves
        return self.saves if position * chunks + chunk < self.saving_layers else ACTIVATION


def layer_options(args: Any, active: Container[str]) -> LayerOptions:
    """Return the options of the active features, by name."""
    saves = "moe-zero-memory" in active
    return LayerOptions(
        overlaps=any(name in active for name in OVERLAPS),
        saves=args.moe_zero_memory if saves else DISABLED,
        saving_layers=args.moe_zero_memory_num_layers if saves else None,
    )

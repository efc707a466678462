"""The features that change what is kept of activations between forward and backward."""

from __future__ import annotations

from mindspeed_core.feature import Feature
from mindspeed_memory.features.recompute import (
    RecomputeActivation,
    RecomputeCounts,
    RecomputeDense,
    RecomputeNorm,
)

ACTIVATION_FEATURES: tuple[type[Feature], ...] = (
    RecomputeActivation,
    RecomputeNorm,
    RecomputeCounts,
    RecomputeDense,
)

"""The features that change what the optimizer keeps, and where, and how memory is handed out."""

from __future__ import annotations

from mindspeed_core.feature import Feature

OPTIMIZER_FEATURES: tuple[type[Feature], ...] = ()

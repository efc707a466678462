"""The features that change what is kept of activations between forward and backward."""

from __future__ import annotations

from mindspeed_core.feature import Feature

ACTIVATION_FEATURES: tuple[type[Feature], ...] = ()

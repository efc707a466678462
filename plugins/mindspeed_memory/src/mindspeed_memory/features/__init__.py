"""The declarations of mindspeed-memory; importing them loads neither torch nor megatron.

Declarations about activations and about the optimizer stand in lists of their own.
"""

from __future__ import annotations

from mindspeed_core.feature import HookApi
from mindspeed_memory.extension_points import OPTIMIZER_STATES
from mindspeed_memory.features.activations import ACTIVATION_FEATURES
from mindspeed_memory.features.optimizer_state import OPTIMIZER_FEATURES

DECLARATIONS = (HookApi("1.3"), OPTIMIZER_STATES, *ACTIVATION_FEATURES, *OPTIMIZER_FEATURES)

__all__ = ["DECLARATIONS"]

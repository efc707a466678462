"""Extension points for other packages; no torch."""

from __future__ import annotations

from mindspeed_core.feature import ExtensionPoint

OPTIMIZER_STATES = ExtensionPoint(
    "memory.optimizer-states",
    group="mindspeed_memory.optimizer_states",
    summary="functions from platform and arguments to a mindspeed_memory.optim.places.Device, which stores "
    "moments of the block-wise AdamW; each under the name of the feature that asks for it",
)

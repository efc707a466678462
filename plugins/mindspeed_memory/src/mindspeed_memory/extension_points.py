"""The extension points of mindspeed-memory, for its declarations and for what calls contributions. No torch.

A package contributes through its ``pyproject.toml``::

    [project.entry-points."mindspeed_memory.optimizer_states"]
    acme-states = "acme_states:device"

The name is that of the feature that asks for this state; it is loaded where that feature is active.
That feature fills the slot ``optimizer-state``, so that a run has one of them at most, and requires the
feature ``block-optimizer``, which calls the function.

``mindspeed-features list --all`` names every extension point, and what is broken.
"""

from __future__ import annotations

from mindspeed_core.feature import ExtensionPoint

OPTIMIZER_STATES = ExtensionPoint(
    "memory.optimizer-states",
    group="mindspeed_memory.optimizer_states",
    summary="functions from platform and arguments to a mindspeed_memory.optim.places.Device, which stores "
    "moments of the block-wise AdamW; each under the name of the feature that asks for it",
)
"""Places and forms of the moments of the block-wise AdamW."""

"""Layers whose feed-forward linears describe their weights in a checkpoint themselves."""

from __future__ import annotations

from typing import Any


class DescribesItsLinears:
    """Mixin of a transformer layer whose weights are not cut as megatron-core's gated MLP expects."""

    mlp: Any

    def __init__(self, *args: Any, **named: Any) -> None:
        """Build the layer."""
        super().__init__(*args, **named)
        # megatron-core hands the group of its ranks to its own class of MLP alone, so that it stays.
        self.mlp.sharded_state_dict = self._mlp_state

    def _mlp_state(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, module in self.mlp.named_children():
            if hasattr(module, "sharded_state_dict"):
                found |= module.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return found

"""Norms with a gate for each channel: ``norm(x) * (1 + gate)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mindspeed_core.layer_spec import NORM_ROLES, SpecEditor
from mindspeed_core.megatron.plain_norm import PlainNorm

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session


class GatedNorm(PlainNorm):
    """LayerNorm or RMSNorm, as the configuration says, with a gate that starts closed."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **options: Any) -> None:
        """Add a gate ``[h]``; the names of the other parameters stay."""
        super().__init__(config, hidden_size, **options)
        self.gate = torch.nn.Parameter(torch.zeros(hidden_size))
        # Each tensor-parallel rank sees its part of the sequence: gradients are summed by this mark.
        self.gate.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalize ``[..., h]``."""
        return super().forward(hidden_states) * (1 + self.gate)


def place_gated_norms(session: Session, spec: Any, *, owner: str) -> Any:
    """Return the tree with `GatedNorm` in place of every norm."""
    editor = SpecEditor(spec, owner=owner, session=session)
    editor.replace(NORM_ROLES, lambda site: site.carry(GatedNorm))
    return editor.spec

"""Weight rules contributed to ``toy.weight-rules``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def late(labels: torch.Tensor) -> torch.Tensor:
    """Later tokens count more: weights rise from 0 to 1 along the sequence ``[b, s]``."""
    import torch

    length = labels.shape[1]
    return torch.linspace(0.0, 1.0, length, device=labels.device).expand(labels.shape)

"""Gate and up projection of old checkpoints, joined as megatron-core's gated linear holds them."""

from __future__ import annotations

import torch
from torch import Tensor


def joined(gate: Tensor, up: Tensor, ranks: int) -> list[Tensor]:
    """Return each rank's weight ``[2 f / t, h]``: its rows of the gate, then its rows of the other half.

    Cutting the joined matrix instead would give the first ranks the gate alone.

    Args:
        gate: ``[f, h]``, whole.
        up: ``[f, h]``, whole.
        ranks: tensor-parallel size; divides ``f``.

    Raises:
        ValueError: the weights differ in shape, or the ranks do not divide them.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up projection {tuple(up.shape)} differ in shape")
    if gate.shape[0] % ranks:
        raise ValueError(f"{gate.shape[0]} rows do not divide over {ranks} ranks; use a divisor")
    return [torch.cat(pair) for pair in zip(gate.chunk(ranks), up.chunk(ranks), strict=True)]

"""Scale, mask rule, bias by distance and dropout: what decides about attention beside queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_cp.engine.masks import MaskRule


@dataclass(frozen=True)
class Dropout:
    """Attention dropout as a function of the score's place, the same for every layout.

    Attributes:
        probability: of dropping an attention weight.
        seed: of this layer and micro-batch.
        first_sample: number of the first sample.
    """

    probability: float
    seed: int
    first_sample: int = 0

    def kept(self, heads: Tensor, samples: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Return ``[b, n, q, k]`` bool, which weights stay, by global head and global positions."""
        state = torch.full((), self.seed & 0xFFFFFFFF, dtype=torch.int64, device=queries.device)
        sample = torch.arange(self.first_sample, self.first_sample + samples, device=queries.device)
        for value, shape in (
            (sample, (-1, 1, 1, 1)),
            (heads, (1, -1, 1, 1)),
            (queries, (1, 1, -1, 1)),
            (keys, (1, 1, 1, -1)),
        ):
            state = _hash(state ^ (value.view(shape) * 0x9E3779B1 & 0xFFFFFFFF))
        return state >= int(self.probability * 2**32)


def _hash(state: Tensor) -> Tensor:
    """Return a 32-bit integer hash (a multiply-xorshift finalizer), in int64."""
    state = (state ^ (state >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ (state >> 16)


@dataclass(frozen=True)
class Scores:
    """Everything beside queries and keys that decides about scores and weights.

    Attributes:
        scale: factor of the products.
        rule: which scores count.
        heads: ``[n]`` int64, global numbers of the query heads here; for slopes and dropout.
        slopes: ``[n]`` float32, bias ``-slope * |distance|``; None without.
        root: the bias takes the root of the distance.
        dropout: None without.
        layout: in which kernels of NPUs get their tensors, ``SBH`` or ``BNSD``.
    """

    scale: float
    rule: MaskRule
    heads: Tensor | None = None
    slopes: Tensor | None = None
    dropout: Dropout | None = None
    layout: str = "SBH"
    root: bool = False

    @property
    def positional(self) -> bool:
        """Return whether the kernel needs global positions."""
        return self.slopes is not None or self.dropout is not None

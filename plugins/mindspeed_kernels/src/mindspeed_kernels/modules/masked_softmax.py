"""The softmax of megatron-core's plain attention, and its placement in a built model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn import Module

from mindspeed_kernels.ops import scaled_masked_softmax

if TYPE_CHECKING:
    from mindspeed_core.session import Session


class MaskedSoftmax(Module):
    """Takes the place of ``FusedScaleMaskSoftmax``, whose fused form needs an extension of Apex."""

    def __init__(self, native: FusedScaleMaskSoftmax) -> None:
        """Take over the settings of the one it replaces."""
        super().__init__()
        self.scale: float = 1.0 if native.scale is None else float(native.scale)
        self.causal = native.attn_mask_type is AttnMaskType.causal
        self.window_size: tuple[int, int] | None = native.window_size

    def forward(self, scores: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """Compute the weights of ``[b, n, sq, sk]`` scores.

        Args:
            scores: ``[b, n, sq, sk]``.
            mask: ``[b | 1, 1, sq, sk]`` bool, True hides.
            softmax_offset: ``[n]``, a further score of every row, without a weight.
        """
        sq, sk = scores.shape[-2:]
        if self.window_size is not None:
            mask = self._window(sq, sk, scores.device)
        if softmax_offset is not None:
            column = softmax_offset.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            hidden = self._hidden(mask, sq, sk, scores.device)
            hidden = None if hidden is None else torch.nn.functional.pad(hidden, (0, 1))
            scores = torch.cat((scores, column / self.scale), dim=-1)
            return scaled_masked_softmax(scores, hidden, self.scale)[..., :-1]
        if mask is None and self.causal and sq == sk > 1:
            return scaled_masked_softmax(scores, None, self.scale, True)
        return scaled_masked_softmax(scores, mask, self.scale)

    def _hidden(self, mask: Tensor | None, sq: int, sk: int, device: torch.device) -> Tensor | None:
        if mask is None and self.causal and sq > 1:
            return torch.ones(1, 1, sq, sk, dtype=torch.bool, device=device).triu_(1)
        return mask

    def _window(self, sq: int, sk: int, device: torch.device) -> Tensor:
        assert self.window_size is not None
        left, right = (sk if side < 0 else side for side in self.window_size)
        position = torch.arange(sk - sq, sk, device=device).unsqueeze(1)
        distance = position - torch.arange(sk, device=device)
        return ((distance > left) | (distance < -right))[None, None]


def place_masked_softmax(session: Session, chunks: list[Any], owner: str) -> None:
    """Replace the softmax of every attention of built chunks until the session closes."""
    for chunk in chunks:
        for module in chunk.modules():
            native = vars(module).get("_modules", {}).get("scale_mask_softmax")
            if isinstance(native, FusedScaleMaskSoftmax):
                session.instances.set(owner, module, "scale_mask_softmax", MaskedSoftmax(native))

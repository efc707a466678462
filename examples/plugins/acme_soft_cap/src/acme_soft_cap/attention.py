"""megatron-core's attention with soft-capped scores, and its placement (Gemma 2, arXiv 2408.00118, 2.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from mindspeed_core.layer_spec import Site, SpecEditor

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mindspeed_core.session import Session


@dataclass(frozen=True)
class CapOptions:
    """Options of `SoftCappedAttention`.

    Attributes:
        value: the cap, above 0.
        compiled: compile the cap with ``torch.compile``.
    """

    value: float
    compiled: bool = False


def soft_cap(scores: Tensor, cap: float) -> Tensor:
    """Scores of any shape within ``(-cap, cap)``, with slope 1 at zero, in their dtype."""
    return torch.tanh(scores / cap) * cap


class SoftCappedSoftmax(torch.nn.Module):
    """megatron-core's masked softmax over capped scores."""

    def __init__(self, softmax: torch.nn.Module, options: CapOptions) -> None:
        """Go around a softmax.

        Args:
            softmax: what the attention would apply.
            options: the cap.
        """
        super().__init__()
        self.softmax = softmax
        self.options = options
        cap: Callable[..., Tensor] = torch.compile(soft_cap) if options.compiled else soft_cap
        self._cap = cap

    def forward(self, scores: Tensor, *mask: Any) -> Tensor:
        """Probabilities ``[b, n, sq, sk]`` of scores ``[b, n, sq, sk]``; masked ones are not capped."""
        probabilities: Tensor = self.softmax(self._cap(scores, self.options.value), *mask)
        return probabilities


class SoftCappedAttention(DotProductAttention):
    """``DotProductAttention`` with capped scores; no further parameters, checkpoints stay as they are."""

    def __init__(self, *args: Any, options: CapOptions, **kwargs: Any) -> None:
        """Take the cap beside what megatron-core passes.

        Args:
            args: of ``DotProductAttention``.
            options: the cap.
            kwargs: of ``DotProductAttention``.
        """
        super().__init__(*args, **kwargs)
        self.scale_mask_softmax: torch.nn.Module = SoftCappedSoftmax(self.scale_mask_softmax, options)


def place_soft_cap(
    session: Session,
    spec: Any,
    options: CapOptions,
    *,
    owner: str,
    layers: Sequence[int] | None,
    config: TransformerConfig,
    vp_stage: int | None,
) -> Any:
    """The specification of a chunk with capped attention.

    Args:
        session: counts what was replaced.
        spec: the chunk's specification; not changed.
        options: the cap.
        owner: the feature.
        layers: only in these layers of the whole model, counted from 1; None for all.
        config: makes layer numbers known.
        vp_stage: virtual pipeline stage of the chunk.
    """
    editor = SpecEditor(spec, owner=owner, session=session, config=config, vp_stage=vp_stage)

    def capped(site: Site) -> ModuleSpec:
        return site.carry(SoftCappedAttention, options=options)

    editor.replace("core_attention", capped, layers=layers)
    return editor.spec

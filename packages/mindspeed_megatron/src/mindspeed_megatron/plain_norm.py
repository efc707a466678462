"""LayerNorm and RMSNorm for megatron-core without TransformerEngine or Apex.

megatron-core's own wrapper of the torch norms asserts that neither sequence parallelism nor zero-centred
gamma is used. Neither needs a kernel: the first needs one attribute on the weights, the second one addition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn import functional as F

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class PlainNorm(Module):
    """The normalization a configuration names, with parameter names as in every other norm of megatron-core.

    Attributes:
        weight: ``[h]``; minus one when ``config.layernorm_zero_centered_gamma``.
        bias: ``[h]`` for LayerNorm, None for RMSNorm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> None:
        """Build the norm of a last dimension ``h`` of ``hidden_size``.

        Normalization, zero-centred gamma and sequence parallelism are read from ``config``; the last three
        arguments are there because megatron-core's norms accept them.

        Raises:
            ValueError: the configuration names neither LayerNorm nor RMSNorm.
        """
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization {config.normalization!r} is neither 'LayerNorm' nor 'RMSNorm'")
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = Parameter(torch.empty(hidden_size))
        self.bias = Parameter(torch.empty(hidden_size)) if config.normalization == "LayerNorm" else None
        self.reset_parameters()
        for parameter in self.parameters():
            # finalize_model_grads sums the gradients of parameters marked so over tensor-parallel ranks,
            # each of which saw only its part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Set the scale to one and the bias to zero."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize ``[..., h]`` over the last dimension; the result has the parameters' dtype.

        A residual stream in float32 beside smaller parameters is normalized in float32.
        """
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if hidden_states.dtype == weight.dtype:
            return self._normalize(hidden_states, weight, bias)
        larger = hidden_states.dtype
        normal = self._normalize(hidden_states, weight.to(larger), None if bias is None else bias.to(larger))
        return normal.to(weight.dtype)

    def _normalize(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.zero_centered:
            weight = 1.0 + weight
        if bias is None:
            return F.rms_norm(hidden_states, (self.hidden_size,), weight, self.eps)
        return F.layer_norm(hidden_states, (self.hidden_size,), weight, bias, self.eps)

    def extra_repr(self) -> str:
        """Size, epsilon and kind for ``repr``."""
        kind = "RMSNorm" if self.bias is None else "LayerNorm"
        return f"{self.hidden_size}, eps={self.eps}, {kind}, zero_centered={self.zero_centered}"

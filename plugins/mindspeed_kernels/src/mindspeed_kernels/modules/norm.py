"""RMSNorm as a megatron-core module, and its placement at every norm of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from mindspeed_kernels.ops import rms_norm
from mindspeed_megatron.layer_spec import NORM_ROLES, SpecEditor

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session


class FusedRMSNorm(Module):
    """Root-mean-square normalization with the constructor and parameter name of megatron-core's norms.

    Checkpoints are interchangeable with the other norms. The weight is marked for sequence parallelism, so
    that its gradient is summed over the tensor-parallel ranks, each of which saw part of the sequence.

    Attributes:
        weight: ``[h]``; minus one when ``config.layernorm_zero_centered_gamma``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
    ) -> None:
        """Build the norm; the last three arguments are accepted because megatron-core's norms take them.

        Args:
            config: zero-centred gamma and sequence parallelism are read from here.
            hidden_size: size ``h`` of the last dimension.
            eps: added to the mean square.
            persist_layer_norm: without meaning here.
            zero_centered_gamma: ``config`` decides.
            normalization: ``config`` decides.

        Raises:
            ValueError: the configuration names another normalization.
        """
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(f"--use-fused-rmsnorm needs --normalization RMSNorm, got {config.normalization}")
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = Parameter(torch.empty(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to one."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize ``[..., h]`` over the last dimension, in its dtype."""
        return rms_norm(hidden_states, self.weight, self.eps, self.zero_centered)

    def extra_repr(self) -> str:
        """Return the size and epsilon for ``repr``."""
        return f"{self.hidden_size}, eps={self.eps}, zero_centered={self.zero_centered}"


def place_rms_norm(session: Session, spec: Any) -> Any:
    """Return the tree with `FusedRMSNorm` at every norm: layers, query, key, latents, and the final one."""
    editor = SpecEditor(spec, owner="fused-rmsnorm", session=session)
    editor.replace(NORM_ROLES, FusedRMSNorm)
    return editor.spec

"""The norm of gradients without values: megatron-core's own makes a tensor from a list of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def l2_norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    per_tensor: bool,
    *rest: object,
) -> tuple[torch.Tensor, None]:
    """Return the norm of all tensors together, ``[1]`` float32, as ``local_multi_tensor_l2_norm`` does."""
    norms = [torch.norm(tensor) for tensors in tensor_lists for tensor in tensors]
    return torch.norm(torch.stack(norms)).float().reshape(1), None

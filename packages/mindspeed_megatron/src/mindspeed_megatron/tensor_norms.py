"""The norm of a list of tensors with one wait for the device.

Without TransformerEngine and Apex, megatron-core's own makes a Python number of the norm of every tensor, and
so waits once for each shard of a gradient. Stacked, they are waited for together; tensors without values,
which dry runs have, need no number at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import utils as megatron_utils


def l2_norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    per_tensor: bool,
    *rest: object,
) -> tuple[torch.Tensor, None]:
    """Return the norm of all tensors together, ``[1]`` float32, as ``local_multi_tensor_l2_norm`` does.

    On CPU it is equal to megatron-core's to the last bit.
    """
    tensors = [tensor for tensors in tensor_lists for tensor in tensors]
    # On the host, as in megatron-core: their squares are summed in the same order on every device.
    norms = torch.stack(torch._foreach_norm(tensors))
    return torch.norm(norms.cpu().float()).reshape(1).to(norms.device), None


def with_one_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap megatron-core's norm of a list of tensors; what TransformerEngine or Apex brings stays."""
    return l2_norm if original is megatron_utils.local_multi_tensor_l2_norm else original

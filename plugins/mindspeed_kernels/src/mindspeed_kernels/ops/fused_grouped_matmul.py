"""``fused_grouped_matmul`` and ``eager_grouped_matmul``: grouped products of weights that lie either way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_kernels.contract import ContractError
from mindspeed_kernels.ops.gmm import npu_gmm_v2


def fused_grouped_matmul(inputs: Tensor, m_split: Sequence[int] | Tensor, weights: Tensor) -> Tensor:
    """Multiply groups of rows with a weight each, with backward.

    Args:
        inputs: ``[m, k]``, the rows of one group behind those of another.
        m_split: ``[E]``, the number of rows of each group.
        weights: ``[E, k, n]``, or ``[E, n, k]`` where that alone fits.

    Returns:
        ``[m, n]``.

    Raises:
        ContractError: neither side of ``weights`` is ``k``, or the numbers do not describe these rows.
    """
    if inputs.shape[-1] not in weights.shape[1:]:
        raise ContractError(
            f"fused_grouped_matmul: weights must be [E, k, n] or [E, n, k] with k {inputs.shape[-1]}, got "
            f"{list(weights.shape)}"
        )
    counts = m_split if isinstance(m_split, Tensor) else torch.tensor(m_split, device=inputs.device)
    upright = weights if weights.shape[1] == inputs.shape[-1] else weights.transpose(1, 2)
    return npu_gmm_v2(inputs, upright, group_list=counts)


def eager_grouped_matmul(inputs: Tensor, m_split: Sequence[int] | Tensor, weights: Tensor) -> Tensor:
    """Multiply groups of rows like `fused_grouped_matmul`; the device decides how in both."""
    return fused_grouped_matmul(inputs, m_split, weights)

"""``GMMFunction``: the grouped product as scripts call it that reach below ``npu_gmm``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mindspeed_kernels.op_builder import GMMOpBuilder, GMMV2OpBuilder
from mindspeed_kernels.ops.gmm import npu_gmm, npu_gmm_v2

GroupArguments = tuple[Any, int, bool, int, int]
"""``(group_list, group_type, gemm_fusion, group_list_type, kind of the list)``."""


class GMMFunction:
    """Grouped products below `npu_gmm`.

    Attributes:
        builder: loads products of lists, and their gradients.
        builder2: the same for counts.
    """

    builder: ClassVar[GMMOpBuilder] = GMMOpBuilder()
    builder2: ClassVar[GMMV2OpBuilder] = GMMV2OpBuilder()

    @staticmethod
    def apply(
        original_weight: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group_args: GroupArguments | Sequence[Any],
    ) -> Tensor:
        """Compute a grouped product with its backward; see `npu_gmm` for the arguments.

        Args:
            original_weight: the parameter that has ``main_grad``, for ``gemm_fusion``.
            x: ``[m, k]``.
            weight: ``[E, k, n]``.
            bias: ``[E, n]``, without gradient.
            group_args: see `GroupArguments`.

        Returns:
            ``[m, n]``.

        Raises:
            ValueError: ``bias`` requires grad, or operands do with ``group_type`` 2.
        """
        group_list, group_type, gemm_fusion, group_list_type, _ = group_args
        follows = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        if bias is not None and bias.requires_grad:
            raise ValueError("bias has no gradient here; detach it and add it to the result instead")
        if follows and group_type:
            raise ValueError(f"group_type must be 0 where gradients are computed, got {group_type}")
        function = npu_gmm_v2 if group_list_type else npu_gmm
        return function(
            x,
            weight,
            bias=bias,
            group_list=group_list,
            group_type=group_type or 0,
            gemm_fusion=bool(gemm_fusion),
            original_weight=original_weight,
        )

"""The loaders of MindSpeed's ``op_builder``: ``SwigluOpBuilder().load().swiglu(x)``.

Nothing is compiled or loaded here. A loader answers with the functions of `mindspeed_kernels.ops`, which take
their arguments in the order of the Python interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mindspeed_kernels.contract import ContractError
from mindspeed_kernels.ops.gmm import npu_gmm, npu_gmm_v2

GroupList = Sequence[int] | Tensor | None


class OpBuilder:
    """A loader.

    Attributes:
        functions: ``{name: module of mindspeed_kernels.ops}`` of the functions it brings.
    """

    functions: ClassVar[Mapping[str, str]] = {}

    def load(self) -> Any:
        """Return an object with the functions."""
        found = {
            name: getattr(import_module(f"mindspeed_kernels.ops.{module}"), name)
            for name, module in self.functions.items()
        }
        return SimpleNamespace(**found)


class RmsNormOpBuilder(OpBuilder):
    """Brings ``rms_norm(x, gamma, epsilon)``."""

    functions: ClassVar[Mapping[str, str]] = {"rms_norm": "rms_norm"}


class SwigluOpBuilder(OpBuilder):
    """Brings ``swiglu(x, dim)``."""

    functions: ClassVar[Mapping[str, str]] = {"swiglu": "swiglu"}


class MatmulAddOpBuilder(OpBuilder):
    """Brings ``npu_matmul_add_fp32`` with the library's argument order."""

    def load(self) -> Any:
        """Return an object with the function, which takes the output's gradient first."""
        from mindspeed_kernels.ops.npu_matmul_add import npu_matmul_add_fp32

        def in_order(grad_output: Tensor, total_input: Tensor, grad: Tensor) -> None:
            npu_matmul_add_fp32(total_input, grad_output, grad)

        return SimpleNamespace(npu_matmul_add_fp32=in_order)


class GroupMatmulAddOpBuilder(OpBuilder):
    """Brings ``npu_groupmatmul_add_fp32(x, dy, grouplist, grad)``."""

    functions: ClassVar[Mapping[str, str]] = {"npu_groupmatmul_add_fp32": "npu_groupmatmul_add"}


class MoeTokenPermuteOpBuilder(OpBuilder):
    """Brings ``npu_moe_token_permute``."""

    functions: ClassVar[Mapping[str, str]] = {"npu_moe_token_permute": "npu_moe_token_permute"}


class MoeTokenUnpermuteOpBuilder(OpBuilder):
    """Brings ``npu_moe_token_unpermute``."""

    functions: ClassVar[Mapping[str, str]] = {"npu_moe_token_unpermute": "npu_moe_token_unpermute"}


class RingAttentionUpdateOpBuilder(OpBuilder):
    """Brings ``npu_ring_attention_update``."""

    functions: ClassVar[Mapping[str, str]] = {"npu_ring_attention_update": "npu_ring_attention_update"}


class FusionAttentionV2OpBuilder(OpBuilder):
    """Brings fused attention and its gradients, which take all arguments by position too."""

    def load(self) -> Any:
        """Return an object with ``npu_fusion_attention_v2`` and ``npu_fusion_attention_grad_v2``."""
        from mindspeed_kernels.ops import fusion_attention_v2

        return SimpleNamespace(
            npu_fusion_attention_v2=_by_position(fusion_attention_v2.npu_fusion_attention),
            npu_fusion_attention_grad_v2=_by_position(fusion_attention_v2.npu_fusion_attention_grad),
        )


class RotaryPositionEmbeddingOpBuilder(OpBuilder):
    """Brings ``npu_rotary_position_embedding``."""

    functions: ClassVar[Mapping[str, str]] = {
        "npu_rotary_position_embedding": "npu_rotary_position_embedding"
    }


class GMMOpBuilder(OpBuilder):
    """Brings grouped products of lists with one tensor each, running ends or counts."""

    def load(self) -> Any:
        """Return an object with ``npu_gmm``, ``npu_gmm_backward`` and ``npu_gmm_backward_fusion``."""
        return SimpleNamespace(
            npu_gmm=_product, npu_gmm_backward=_gradients, npu_gmm_backward_fusion=_gradients_of_rows
        )


class GMMV2OpBuilder(GMMOpBuilder):
    """Brings the same functions; the number of the list's kind decides, not the loader."""


def _by_position(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function take its keywords by position, in the order of its signature."""
    names = tuple(signature(function).parameters)

    def call(*args: Any, **options: Any) -> Any:
        return function(**dict(zip(names, args, strict=False)), **options)

    return call


def _one(name: str, tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) != 1:
        raise ContractError(f"npu_gmm: {name} must be a list of one tensor, got {len(tensors)}")
    return tensors[0]


def _product(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] | None,
    group_list: GroupList,
    group_type: int | None = 0,
    group_list_type: int | None = 0,
) -> list[Tensor]:
    """Compute ``[x_e · W_e]``, without autograd."""
    function = npu_gmm_v2 if group_list_type else npu_gmm
    with torch.no_grad():
        result = function(
            _one("x", x),
            _one("weight", weight),
            bias=_one("bias", bias) if bias else None,
            group_list=group_list,  # type: ignore[arg-type]
            group_type=group_type or 0,
        )
    return [result]


def _gradients(
    grad: Sequence[Tensor],
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    group_list: GroupList,
    group_list_type: int | None = 0,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Compute the gradients of rows ``[m, k]`` and weights ``[E, k, n]``; none of a bias."""
    rows = _gradients_of_rows(grad, weight, group_list, group_list_type)[0]
    transposed = [_one("x", x).t()]
    return rows, _product(transposed, grad, None, group_list, 2, group_list_type), []


def _gradients_of_rows(
    grad: Sequence[Tensor],
    weight: Sequence[Tensor],
    group_list: GroupList,
    group_list_type: int | None = 0,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Compute the gradients of rows alone."""
    transposed = [_one("weight", weight).transpose(-1, -2)]
    return _product(grad, transposed, None, group_list, 0, group_list_type), [], []

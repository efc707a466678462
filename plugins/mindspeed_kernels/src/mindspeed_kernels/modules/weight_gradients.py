"""The provider of accumulating weight gradients that megatron-core's linear layers look for.

They call an optional extension by a module attribute that is missing where it is not installed. The class
here takes its place and calls our operator.
"""

from __future__ import annotations

from torch import Tensor

from mindspeed_kernels.ops.npu_matmul_add import npu_matmul_add_fp32


class LinearWeightGradients:
    """Weight gradients for megatron-core's linear layers under ``gradient_accumulation_fusion``."""

    @staticmethod
    def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """Add ``grad_output [m, n]ᵀ · total_input [m, k]`` to a float32 ``main_grad [n, k]`` in place."""
        npu_matmul_add_fp32(total_input, grad_output, main_grad)

    @staticmethod
    def wgrad_gemm_accum_fp16(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """Add the same to a ``main_grad`` in the dtype of the operands."""
        npu_matmul_add_fp32(total_input, grad_output, main_grad)

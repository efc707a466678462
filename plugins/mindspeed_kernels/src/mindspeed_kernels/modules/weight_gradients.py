"""The provider of accumulating weight gradients that megatron-core's linear layers look for.

They call an optional extension by a module attribute that is missing where it is not installed. The class
here takes its place for as long as the feature is active, and calls our operator, so that the GEMM itself
adds the gradients of weights to the gradient buffer.
"""

from __future__ import annotations

from mindspeed_kernels.ops.npu_matmul_add import npu_matmul_add_fp32


class LinearWeightGradients:
    """Weight gradients for megatron-core's linear layers under ``gradient_accumulation_fusion``.

    Both take ``total_input [m, k]``, ``grad_output [m, n]`` and ``main_grad [n, k]``, to which they add in
    place; it is float32 for the first, and of the operands' dtype for the second.

    Source: ``fused_weight_gradient_mlp_cuda`` of apex, which megatron-core's
    ``LinearWithGradAccumulationAndAsyncCommunication`` calls.
    """

    # The same operator adds to either dtype.
    wgrad_gemm_accum_fp32 = npu_matmul_add_fp32
    wgrad_gemm_accum_fp16 = npu_matmul_add_fp32

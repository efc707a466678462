"""Operators as functions: one module each, with the definition, the fast paths and the contract.

Call them like functions; the backend follows from the device, the dtypes and the options of the call:

    from mindspeed_kernels.ops import rms_norm, use

    y = rms_norm(x, gamma, 1e-5)
    with use(rms_norm="reference"):
        slow = rms_norm(x, gamma, 1e-5)

A choice is forced by ``use``, by the flag ``--ops-backend OP=BACKEND`` or by the environment variable
``MINDSPEED_OPS`` (read when an operator meets a kind of call for the first time). A forced backend that
cannot serve is an error; passing over a better backend by itself is said once, as a warning of the logger
``mindspeed_kernels.ops``. ``mindspeed-features ops`` lists every backend and why it cannot run here.

To add an operator, write one module:

1. a reference, the readable definition in differentiable torch operations that work on every device;
2. ``name = Operator("name", reference, contract=..., key=..., saved=..., samples=...)``;
3. ``@name.backend("cpu", ("cpu",), priority=..., supports=..., contract=...)`` on each fast path. A fast path
   without backward says ``differentiable=False``; then calls that need gradients are refused;
4. its import below. ``tests/test_conformance.py`` compares every backend that can run with the reference on
   the samples: values, gradients, one graph under ``torch.compile``.

A backend from another package is a `Backend` in an iterable that an entry point of the group
``mindspeed_kernels.backends`` names.
"""

from __future__ import annotations

import mindspeed_kernels.ops.liger  # noqa: F401 - adds its backends
from mindspeed_kernels.absent import ABSENT, absence
from mindspeed_kernels.contract import ContractError
from mindspeed_kernels.ops.backend import Backend
from mindspeed_kernels.ops.catalog import Explanation, explain
from mindspeed_kernels.ops.choice import BackendError, checking, use
from mindspeed_kernels.ops.cross_entropy import cross_entropy
from mindspeed_kernels.ops.dropout_add_layer_norm import npu_dropout_add_layer_norm
from mindspeed_kernels.ops.dropout_add_rms_norm import npu_dropout_add_rms_norm
from mindspeed_kernels.ops.ffn import npu_ffn
from mindspeed_kernels.ops.fusion_attention import npu_fusion_attention
from mindspeed_kernels.ops.fusion_attention_grad import npu_fusion_attention_grad
from mindspeed_kernels.ops.gmm import grouped_matmul, npu_gmm, npu_gmm_v2
from mindspeed_kernels.ops.gmm_mxfp8 import mx_grouped_matmul, npu_quant_group_gemm
from mindspeed_kernels.ops.grouped_matmul_mc2 import all2all_grouped_matmul, grouped_matmul_all2all
from mindspeed_kernels.ops.lcal_functional import coc_ops
from mindspeed_kernels.ops.npu_all_to_all_all_gather_bmm import npu_alltoall_allgather_bmm
from mindspeed_kernels.ops.npu_bmm_reduce_scatter_all_to_all import npu_bmm_reducescatter_alltoall
from mindspeed_kernels.ops.npu_grouped_mat_mul_all_reduce import npu_grouped_mat_mul_all_reduce
from mindspeed_kernels.ops.npu_groupmatmul_add import npu_groupmatmul_add_fp32
from mindspeed_kernels.ops.npu_lightning_indexer import npu_lightning_indexer
from mindspeed_kernels.ops.npu_matmul_add import npu_matmul_add_fp32
from mindspeed_kernels.ops.npu_mm_all_reduce_add_rms_norm import npu_mm_all_reduce_add_rms_norm
from mindspeed_kernels.ops.npu_mm_all_reduce_add_rms_norm_ import npu_mm_all_reduce_add_rms_norm_
from mindspeed_kernels.ops.npu_moe_token_permute import npu_moe_token_permute
from mindspeed_kernels.ops.npu_moe_token_permute_with_routing_map import (
    npu_moe_token_permute_with_routing_map,
)
from mindspeed_kernels.ops.npu_moe_token_unpermute import npu_moe_token_unpermute
from mindspeed_kernels.ops.npu_moe_token_unpermute_with_routing_map import (
    npu_moe_token_unpermute_with_routing_map,
)
from mindspeed_kernels.ops.npu_ring_attention_update import npu_ring_attention_update
from mindspeed_kernels.ops.npu_rotary_position_embedding import npu_rotary_position_embedding
from mindspeed_kernels.ops.npu_sparse_lightning_indexer_grad_kl_loss import (
    npu_sparse_lightning_indexer_grad_kl_loss,
)
from mindspeed_kernels.ops.operator import OPERATORS, Operator, Sample
from mindspeed_kernels.ops.overlapped_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from mindspeed_kernels.ops.quant_gmm import npu_quant_gmm, npu_quant_gmm_v2
from mindspeed_kernels.ops.rms_norm import rms_norm
from mindspeed_kernels.ops.scaled_masked_softmax import scaled_masked_softmax
from mindspeed_kernels.ops.swiglu import swiglu
from mindspeed_kernels.ops.triangle_attention import triangle_attention
from mindspeed_kernels.ops.weight_quant_gmm import npu_weight_quant_gmm, npu_weight_quant_gmm_v2

__all__ = [
    "OPERATORS",
    "Backend",
    "BackendError",
    "ContractError",
    "Explanation",
    "Operator",
    "Sample",
    "all2all_grouped_matmul",
    "all_gather_matmul",
    "checking",
    "coc_ops",
    "cross_entropy",
    "explain",
    "grouped_matmul",
    "grouped_matmul_all2all",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "mx_grouped_matmul",
    "npu_alltoall_allgather_bmm",
    "npu_bmm_reducescatter_alltoall",
    "npu_dropout_add_layer_norm",
    "npu_dropout_add_rms_norm",
    "npu_ffn",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_gmm",
    "npu_gmm_v2",
    "npu_grouped_mat_mul_all_reduce",
    "npu_groupmatmul_add_fp32",
    "npu_lightning_indexer",
    "npu_matmul_add_fp32",
    "npu_mm_all_reduce_add_rms_norm",
    "npu_mm_all_reduce_add_rms_norm_",
    "npu_moe_token_permute",
    "npu_moe_token_permute_with_routing_map",
    "npu_moe_token_unpermute",
    "npu_moe_token_unpermute_with_routing_map",
    "npu_quant_gmm",
    "npu_quant_gmm_v2",
    "npu_quant_group_gemm",
    "npu_ring_attention_update",
    "npu_rotary_position_embedding",
    "npu_sparse_lightning_indexer_grad_kl_loss",
    "npu_weight_quant_gmm",
    "npu_weight_quant_gmm_v2",
    "rms_norm",
    "scaled_masked_softmax",
    "swiglu",
    "triangle_attention",
    "use",
]


def __getattr__(name: str) -> object:
    """Say of an operator that is not here why."""
    if name in ABSENT:
        # Of another kind than AttributeError, which an import would replace with a sentence of its own.
        raise ImportError(absence(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

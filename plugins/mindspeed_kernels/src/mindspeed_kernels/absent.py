"""Names of MindSpeed's operators that are not here, each with the reason and the way out. No torch."""

from __future__ import annotations

from collections.abc import Mapping

_SINGLE = "it is the call below the operator of the name without single, which is here; use that one"
_OPTIMIZER = "a fused optimizer step is no operator of a model; torch.optim.AdamW(fused=True) is one"
_TENSOR_PARALLEL = "mindspeed-tp has it; import it from mindspeed_tp.ops.lcal_functional"

ABSENT: Mapping[str, str] = {
    "npu_alltoall_allgather_bmm_single": _SINGLE,
    "npu_bmm_reducescatter_alltoall_single": _SINGLE,
    "npu_mm_all_reduce_add_rms_norm_single": _SINGLE,
    "npu_mm_all_reduce_add_rms_norm_single_": _SINGLE,
    "npu_apply_fused_adamw_v2": _OPTIMIZER,
    "npu_apply_fused_ema_adamw": (
        "a fused optimizer step is no operator of a model, and nothing here averages weights"
    ),
    "npu_sparse_attn_shared_kv": (
        "sparse attention is not part of mindspeed-kernels, and torch_npu 2.13 has no such kernel"
    ),
    "CoCConfig": _TENSOR_PARALLEL,
    "TP2DConfig": _TENSOR_PARALLEL,
    "set_comm_config": _TENSOR_PARALLEL,
    "all_gather_matmul_reduce_scatter": _TENSOR_PARALLEL,
}
"""By name; sentences without their beginning, which `absence` puts before them."""


def absence(name: str) -> str:
    """Return the sentence about a name of `ABSENT`."""
    return f"{name} of MindSpeed is not here: {ABSENT[name]}"

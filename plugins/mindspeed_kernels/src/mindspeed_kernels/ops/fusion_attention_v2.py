"""Fused attention and its gradients under the names and keywords of MindSpeed's ``ops.fusion_attention_v2``.

Scripts move over by changing the import. `npu_fusion_attention` is the operator itself; the gradients take
other keywords there than those of torch_npu, which the operator `npu_fusion_attention_grad` has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.attention.visibility import UNLIMITED
from mindspeed_kernels.contract import ContractError
from mindspeed_kernels.ops import fusion_attention_grad
from mindspeed_kernels.ops.fusion_attention import npu_fusion_attention

__all__ = ["npu_fusion_attention", "npu_fusion_attention_grad"]


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_outputs: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    inner_precise: int = 0,
    seed: int = 1234,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | Tensor | None = None,
    actual_seq_qlen: Sequence[int] | Tensor | None = None,
    actual_seq_kvlen: Sequence[int] | Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = 1,
    q_start_idx: Sequence[int] | int | None = None,
    kv_start_idx: Sequence[int] | int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of queries, keys, values and ``pse``; see the operator of the same name.

    Args:
        query: as in forward, like all arguments that have a name of `npu_fusion_attention`.
        key: as in forward.
        value: as in forward.
        grad_outputs: the gradient of the context, in its layout.
        head_num: heads of ``query``.
        input_layout: as in forward.
        pse: as in forward.
        padding_mask: must be None.
        atten_mask: as in forward.
        softmax_max: from forward; without it, ``softmax_sum`` and ``attention_in`` forward is computed again.
        softmax_sum: from forward.
        softmax_in: without meaning.
        attention_in: the context, from forward.
        scale: as in forward.
        keep_prob: as in forward.
        pre_tokens: as in forward.
        next_tokens: as in forward.
        inner_precise: as in forward.
        seed: from forward, where weights were dropped.
        offset: from forward.
        numels: from forward.
        prefix: as in forward.
        actual_seq_qlen: as in forward.
        actual_seq_kvlen: as in forward.
        sparse_mode: as in forward.
        gen_mask_parallel: without meaning outside of NPUs.
        sync: without meaning outside of NPUs.
        pse_type: as in forward.
        q_start_idx: as in forward.
        kv_start_idx: as in forward.

    Raises:
        ContractError: arguments do not fit together, or weights were dropped and statistics are missing.
    """
    forward: dict[str, Any] = {
        "pse": pse,
        "padding_mask": padding_mask,
        "atten_mask": atten_mask,
        "keep_prob": keep_prob,
        "pre_tokens": pre_tokens,
        "next_tokens": next_tokens,
        "inner_precise": inner_precise,
        "prefix": prefix,
        "actual_seq_qlen": actual_seq_qlen,
        "actual_seq_kvlen": actual_seq_kvlen,
        "sparse_mode": sparse_mode,
        "gen_mask_parallel": gen_mask_parallel,
        "sync": sync,
        "pse_type": pse_type,
        "q_start_idx": q_start_idx,
        "kv_start_idx": kv_start_idx,
    }
    with torch.no_grad():
        if softmax_max is None or softmax_sum is None or attention_in is None:
            if keep_prob < 1.0:
                raise ContractError(
                    "npu_fusion_attention_grad[any]: softmax_max, softmax_sum and attention_in must be given "
                    f"with keep_prob below 1, got {keep_prob}; nearest supported: those of forward"
                )
            attention_in, softmax_max, softmax_sum, *_ = npu_fusion_attention(
                query, key, value, head_num, input_layout, scale=scale, **forward
            )
        found = fusion_attention_grad.npu_fusion_attention_grad(
            *(query, key, value, grad_outputs, head_num, input_layout),
            softmax_max=softmax_max,
            softmax_sum=softmax_sum,
            attention_in=attention_in,
            scale_value=scale,
            seed=seed,
            offset=offset,
            numels=numels,
            **forward,
        )
    return found[:4]

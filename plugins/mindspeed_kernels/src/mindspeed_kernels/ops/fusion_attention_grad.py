"""Gradients of fused attention from the results of forward, for ring attention.

The keys may be one part of those that the context and the row numbers belong to; the gradients of the parts
add up to those of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mindspeed_kernels.attention.arguments import Inputs, Options, kernel_switches, options_of, prepare
from mindspeed_kernels.attention.blockwise import attend_backward
from mindspeed_kernels.attention.cuda import flash_gradients, flash_limits
from mindspeed_kernels.attention.layouts import from_bnsd, to_bnsd
from mindspeed_kernels.attention.npu_limits import kernel_refusal, warn_of
from mindspeed_kernels.attention.packed_ends import gradients_at_ends
from mindspeed_kernels.attention.reference import dense_gradients
from mindspeed_kernels.attention.service import npu_attention_grad
from mindspeed_kernels.attention.visibility import UNLIMITED
from mindspeed_kernels.call import UNKNOWN, Call
from mindspeed_kernels.contract import NPU_FLOATING, Choice, ContractError, Dtype, Range, Rank, SameDtype
from mindspeed_kernels.ops.availability import kernel_of_training_devices
from mindspeed_kernels.ops.fusion_attention import fusion_attention_reference, logsum_of
from mindspeed_kernels.ops.operator import Make, Operator, Sample

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def fusion_attention_grad_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    inner_precise: int = 0,
    seed: int = 0,
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
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
) -> Gradients:
    """Return the gradients of queries, keys, values, ``pse`` and ``sink``.

    With ``P = exp(scores - logsum)`` and ``delta`` the row sums of ``dy * context``: ``dv = P^T dy``,
    ``ds = P * (dy v^T - delta)``, ``dq = scale * ds k``, ``dk = scale * ds^T q``.

    Arguments with a name of `npu_fusion_attention` are those of forward; ``key`` and ``value`` may be a part
    of its keys. ``dy`` is the gradient of the context, in its layout; ``softmax_max`` and ``softmax_sum`` are
    from forward, possibly of all keys, and so is the context ``attention_in``. ``scale_value`` is its
    ``scale``; ``seed``, ``offset`` and ``numels`` are from forward; ``softmax_in`` has no meaning.

    Returns:
        ``(dq, dk, dv, dpse, dsink)``; the last two are None where there is nothing to differentiate. On NPUs
        ``dpse`` is None unless ``pse`` requires grad: the fused kernel does not compute it, products do.

    Raises:
        ContractError: arguments are not supported; dropped weights are known from ``dropout_mask`` only.
    """
    options = options_of(
        head_num,
        input_layout,
        pse=pse,
        padding_mask=padding_mask,
        atten_mask=atten_mask,
        scale=scale_value,
        keep_prob=keep_prob,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        prefix=prefix,
        actual_seq_qlen=actual_seq_qlen,
        actual_seq_kvlen=actual_seq_kvlen,
        sparse_mode=sparse_mode,
        pse_type=pse_type,
        q_start_idx=q_start_idx,
        kv_start_idx=kv_start_idx,
        sink=sink,
        dropout_mask=dropout_mask,
    )
    if keep_prob < 1.0 and dropout_mask is None:
        raise ContractError(
            "npu_fusion_attention_grad[reference]: keep_prob below 1 needs dropout_mask, got None; "
            "nearest supported: the mask that forward was given"
        )
    inputs = prepare(query, key, value, options)
    outer, context, logsum = _outcome(dy, attention_in, softmax_max, softmax_sum, options, inputs)
    return _in_layout(dense_gradients(inputs, outer, context, logsum, sink), options.layout)


def _outcome(
    dy: Tensor,
    attention_in: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    options: Options,
    inputs: Inputs,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient and context as ``[b, n, sq, dv]`` and the logarithm of the sums ``[b, n, sq]``."""
    shape = (*inputs.query.shape[:3], inputs.value.shape[3])
    outer, context = (to_bnsd(item, options.layout, options.head_num) for item in (dy, attention_in))
    for name, item in (("dy", outer), ("attention_in", context)):
        if item.shape != shape:
            raise ContractError(
                f"npu_fusion_attention_grad[any]: {name} must be like the context {shape}, got "
                f"{tuple(item.shape)}; nearest supported: {shape}"
            )
    wide = torch.promote_types(inputs.query.dtype, torch.float32)
    logsum = logsum_of(softmax_max[..., 0], softmax_sum[..., 0]).to(wide)
    if options.layout == "TND":
        logsum = logsum.transpose(0, 1).unsqueeze(0)
    return outer, context, logsum


def _in_layout(found: Gradients, layout: str) -> Gradients:
    to_query, to_key, to_value = (from_bnsd(item, layout) for item in found[:3])
    return to_query, to_key, to_value, found[3], found[4]


def _samples(make: Make) -> list[Sample]:
    query, key, value, dy = make(6, 2, 32), make(7, 2, 16), make(7, 2, 16), make(6, 2, 32)

    def after_forward(mode: int, scale: float) -> Sample:
        # Numbers that no forward made would not be those of a softmax: weights could be of any size.
        reference = fusion_attention_reference
        found = reference(query, key, value, 4, "SBH", scale=scale, sparse_mode=mode)
        facts = {"attention_in": found[0], "softmax_max": found[1], "softmax_sum": found[2]}
        options = {**facts, "sparse_mode": mode, "scale_value": scale}
        return Sample((query, key, value, dy, 4, "SBH"), options, backward=False)

    return [after_forward(2, 1.0), after_forward(3, 0.3)]


def _key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    atten_mask: Tensor | None = None,
    keep_prob: float = 1.0,
    sparse_mode: int = 0,
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    **others: Any,
) -> tuple[Any, ...]:
    given = pse is None, atten_mask is None, sink is None, dropout_mask is None
    return query.device, query.dtype, dy.dtype, query.ndim, input_layout, sparse_mode, keep_prob < 1.0, given


npu_fusion_attention_grad = Operator(
    "npu_fusion_attention_grad",
    fusion_attention_grad_reference,
    contract=(
        Dtype("query"),
        SameDtype(("query", "key", "value", "dy", "attention_in")),
        Rank("query", 3, 4),
        Choice("input_layout", ("SBH", "BSH", "BNSD", "BSND", "TND", "SBND")),
        Range("sparse_mode", 0, 8),
    ),
    key=_key,
    saved="nothing",
    samples=_samples,
    differentiable=False,
)


@npu_fusion_attention_grad.backend("blocks", ("cpu", "cuda", "npu"), differentiable=False)
@gradients_at_ends
def _blocks(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **given: Any
) -> Gradients:
    options, state = _split(head_num, input_layout, given)
    inputs = prepare(query, key, value, options, state["seed"])
    facts = given["attention_in"], given["softmax_max"], given["softmax_sum"]
    outer, context, logsum = _outcome(dy, *facts, options, inputs)
    tensor = None if inputs.attention.bias is None else inputs.attention.bias.tensor
    if tensor is not None and (options.layout == "TND" or tensor.shape[2] not in (1, inputs.query.shape[2])):
        tensor = None
    found = attend_backward(
        outer, inputs.query, inputs.key, inputs.value, tensor, options.sink, context, logsum, inputs.attention
    )
    return _in_layout(found, options.layout)


def _flash_limits(call: Call) -> str:
    keep = call["keep_prob"]
    if keep is not UNKNOWN and keep < 1.0:
        return "it does not know which weights forward dropped"
    return flash_limits(call)


@npu_fusion_attention_grad.backend(
    "flash", ("cuda",), priority=10, supports=_flash_limits, differentiable=False
)
def _flash(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **given: Any
) -> Gradients:
    options, state = _split(head_num, input_layout, given)
    inputs = prepare(query, key, value, options, state["seed"])
    facts = given["attention_in"], given["softmax_max"], given["softmax_sum"]
    found = flash_gradients(inputs, *_outcome(dy, *facts, options, inputs))
    if found is None or inputs.attention.drops:
        return cast(Gradients, _blocks(query, key, value, dy, head_num, input_layout, **given))
    return _in_layout((*found, None, None), options.layout)


@npu_fusion_attention_grad.backend(
    "npu",
    ("npu",),
    priority=10,
    available=kernel_of_training_devices,
    contract=(Dtype("query", NPU_FLOATING),),
    differentiable=False,
)
@gradients_at_ends
def _npu(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **given: Any
) -> Gradients:
    options, state = _split(head_num, input_layout, given)
    facts = given["softmax_max"], given["softmax_sum"], given["attention_in"]
    inputs = prepare(query, key, value, options)
    reason = kernel_refusal(inputs, options)
    # Products draw dropped weights from a seed alone, and leave the kernel's other two numbers zero.
    if reason or (options.keep_prob < 1.0 and not state["numels"]):
        if reason:
            warn_of(reason)
        return cast(Gradients, _blocks(query, key, value, dy, head_num, input_layout, **given))
    _outcome(dy, facts[2], *facts[:2], options, inputs)
    found = npu_attention_grad(
        (query, key, value, dy), options, inputs, *facts, {**state, **kernel_switches(given)}
    )
    return cast(Gradients, found)


def _split(head_num: int, input_layout: str, given: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Return the options of forward, and what forward returned about its random numbers."""
    state = {name: given.get(name, 0) for name in ("seed", "offset", "numels")}
    others = ("softmax_max", "softmax_sum", "attention_in", "softmax_in", "scale_value", *state)
    forward = {name: value for name, value in given.items() if name not in others}
    return options_of(head_num, input_layout, scale=given.get("scale_value", 1.0), **forward), state

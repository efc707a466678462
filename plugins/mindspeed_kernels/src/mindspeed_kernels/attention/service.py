"""Fused attention through torch_npu: the version of its operator, masks, spelling of the arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.attention.arguments import Options, first, numbers
from mindspeed_kernels.attention.mask_store import STORE
from mindspeed_kernels.attention.visibility import of_mode
from mindspeed_kernels.call import Call, TensorFacts

_LARGEST_WIDTH = 768


def npu_limits(call: Call) -> str:
    """Return why the kernel cannot serve a call; empty when it can."""
    query = call["query"]
    if isinstance(query, TensorFacts) and query.shape is not None:
        layout = call["input_layout"].upper()
        width = query.shape[-1] // call["head_num"] if layout in ("SBH", "BSH") else query.shape[-1]
        if width > _LARGEST_WIDTH:
            return f"heads are {width} wide, the kernel knows up to {_LARGEST_WIDTH}"
    return ""


def npu_attention(
    query: Tensor, key: Tensor, value: Tensor, options: Options, switches: Mapping[str, Any]
) -> Any:
    """Call the kernel; see `npu_fusion_attention` for results, `kernel_switches` for the last argument."""
    import torch_npu

    layout = options.layout
    if layout == "SBND":
        query, key, value = (tensor.flatten(2) for tensor in (query, key, value))
    optional = {"sink": options.sink, "dropout_mask": options.dropout_mask}
    common = {
        **_common(query, key, options),
        "scale": options.scale,
        **switches,
        **{name: tensor for name, tensor in optional.items() if tensor is not None},
    }
    arguments = (query, key, value, options.head_num, "SBH" if layout == "SBND" else layout)
    versions = torch_npu.npu_fusion_attention, torch_npu.npu_fusion_attention_v2
    result = _of_version(versions, options, arguments, common)
    if layout == "SBND":
        return (result[0].unflatten(-1, (options.head_num, -1)), *result[1:])
    return tuple(result)


def npu_attention_grad(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    options: Options,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    context: Tensor,
    state: dict[str, Any],
) -> Any:
    """Call the kernel's backward.

    Args:
        tensors: query, key, value and the gradient of the context.
        options: those of forward.
        softmax_max: from forward.
        softmax_sum: from forward.
        context: from forward.
        state: ``seed``, ``offset`` and ``numels`` from forward, and ``inner_precise``, ``sync``,
            ``gen_mask_parallel``.
    """
    import torch_npu

    layout = options.layout
    query, key = tensors[:2]
    widths = [tensor.shape[2:] for tensor in tensors[:3]]
    if layout == "SBND":
        query, key, value, gradient = (tensor.flatten(2) for tensor in tensors)
        tensors, context = (query, key, value, gradient), context.flatten(2)
    common = {
        **_common(query, key, options),
        "softmax_max": softmax_max,
        "softmax_sum": softmax_sum,
        "attention_in": context,
        "scale_value": options.scale,
        **state,
    }
    arguments = (*tensors, options.head_num, "SBH" if layout == "SBND" else layout)
    versions = torch_npu.npu_fusion_attention_grad, torch_npu.npu_fusion_attention_grad_v2
    result = _of_version(versions, options, arguments, common)
    found = list(result)
    if needs_second_version(options):
        # Between the bias and the sink it has gradients of separate rotary parts, which are never given.
        del found[4:6]
    # What was not given has a gradient without elements.
    found[3:] = [part if part is not None and part.numel() else None for part in found[3:]]
    if layout == "SBND":
        found[:3] = [part.unflatten(-1, width) for part, width in zip(found, widths)]
    return tuple(found)


def _common(query: Tensor, key: Tensor, options: Options) -> dict[str, Any]:
    """Return the arguments that forward and backward spell alike."""
    return {
        "pse": _pse(query, options),
        "atten_mask": _mask(query, key, options),
        "keep_prob": options.keep_prob,
        "prefix": _list(options.prefix),
        "actual_seq_qlen": _list(options.actual_seq_qlen),
        "actual_seq_kvlen": _list(options.actual_seq_kvlen),
        "sparse_mode": options.sparse_mode,
    }


def needs_second_version(options: Options) -> bool:
    """Return whether only the second version of the kernel knows what is asked for."""
    starts = options.q_start_idx is not None or options.kv_start_idx is not None
    return (options.pse is not None and options.pse_type != 1) or starts


def _of_version(
    versions: tuple[Callable[..., Any], Callable[..., Any]],
    options: Options,
    arguments: tuple[Any, ...],
    common: Mapping[str, Any],
) -> Any:
    """Call the first of two versions of a kernel, or the second where it has to be.

    They spell the limits of bands differently, and only the second takes a kind of bias and first positions.
    """
    first_version, second_version = versions
    if not needs_second_version(options):
        limits = {"pre_tockens": options.pre_tokens, "next_tockens": options.next_tokens}
        return first_version(*arguments, **limits, **common)
    return second_version(
        *arguments,
        pre_tokens=options.pre_tokens,
        next_tokens=options.next_tokens,
        pse_type=options.pse_type,
        q_start_idx=_start(options.q_start_idx),
        kv_start_idx=_start(options.kv_start_idx),
        **common,
    )


def _start(value: Any) -> list[int] | None:
    return None if value is None else [first(value)]


def _list(values: Any) -> list[int] | None:
    return None if values is None else numbers(values)


def _pse(query: Tensor, options: Options) -> Tensor | None:
    if options.pse is None:
        return None
    return options.pse.float() if options.pse_type in (2, 3) else options.pse.to(query.dtype)


def _mask(query: Tensor, key: Tensor, options: Options) -> Tensor | None:
    """Return the mask in the form of the mode; the kernel does not broadcast queries and keys."""
    mode, mask = options.sparse_mode, options.atten_mask
    if mask is not None or mode in (0, 1):
        return mask
    if mode == 6:
        return STORE.prefix(query.device)
    if mode != 5:
        return STORE.causal(query.device)
    sizes = {"SBH": 0, "SBND": 0, "BSH": 1, "BSND": 1, "BNSD": 2}
    sq, sk = query.shape[sizes[options.layout]], key.shape[sizes[options.layout]]
    visibility = of_mode(mode, sq, sk, prefix=tuple(_list(options.prefix) or ()))
    visible = visibility.block((0, sq), (0, sk), query.device)
    batch = query.shape[1 if options.layout in ("SBH", "SBND") else 0]
    if visible is None:
        return torch.zeros(batch, 1, sq, sk, dtype=torch.bool, device=query.device)
    return (~visible).expand(batch, 1, sq, sk)

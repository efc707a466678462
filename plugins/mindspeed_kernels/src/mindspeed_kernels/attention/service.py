"""Fused attention through torch_npu: the version of its operator, masks, statistics, spelling of arguments.

What this module may rely on is the contract of the kernels in `mindspeed_testing.npu.kernels.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.attention.arguments import Inputs, Options, first, numbers
from mindspeed_kernels.attention.bias import Bias
from mindspeed_kernels.attention.blocks import Piece
from mindspeed_kernels.attention.mask_store import STORE
from mindspeed_kernels.attention.visibility import UNLIMITED, Visibility
from mindspeed_kernels.npu_builds import call_missing

_ZERO_EMPTY_ROWS = 2
"""Value of ``inner_precise`` that makes rows zero that see nothing; they are the average of values else."""
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class KernelMask:
    """The mask of an attention as the kernel wants it.

    Attributes:
        mode: sparse mode.
        mask: True hides; None for no mask at all.
        pre: keys before the position that a query sees.
        following: keys behind.
        empty_rows: there may be queries that see nothing.
    """

    mode: int
    mask: Tensor | None = None
    pre: int = UNLIMITED
    following: int = UNLIMITED
    empty_rows: bool = False


def npu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    inputs: Inputs,
    switches: Mapping[str, Any],
) -> tuple[Any, ...]:
    """Call the kernel.

    Args:
        query: in the layout of ``options``; without tokens behind the last packed sequence.
        key: likewise.
        value: likewise.
        options: checked by ``prepare``, and not refused by `kernel_refusal`.
        inputs: from ``prepare``.
        switches: see ``kernel_switches``.

    Returns:
        See ``npu_fusion_attention``.
    """
    import torch_npu

    layout, mask = options.layout, kernel_mask(inputs, options)
    if layout == "SBND":
        query, key, value = (tensor.flatten(2) for tensor in (query, key, value))
    common = {**_common(inputs, options, mask), "scale": options.scale, **_precise(switches, mask)}
    second = needs_second_version(options)
    if second and options.keep_prob < 1.0 and not call_missing("npu_fusion_attention_v2", "seed"):
        # Ascend 950 takes the seed as it is; others replace it.
        common["seed"] = int(torch.randint(1 << 31, (), device=query.device))
    arguments = (query, key, value, options.head_num, "SBH" if layout == "SBND" else layout)
    versions = torch_npu.npu_fusion_attention, torch_npu.npu_fusion_attention_v2
    context, maximum, total, *others = _of_version(versions, options, mask, arguments, common)
    if layout == "SBND":
        context = context.unflatten(-1, (options.head_num, -1))
    if layout == "TND" and second:
        maximum, total = (in_tokens(number, inputs.attention.pieces) for number in (maximum, total))
    if mask.empty_rows:
        total = total.masked_fill(maximum <= _LOWEST, 0.0)
    return (context, maximum, total, *others)


def npu_attention_grad(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    options: Options,
    inputs: Inputs,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    context: Tensor,
    state: dict[str, Any],
) -> tuple[Tensor | None, ...]:
    """Call the kernel's backward.

    Args:
        tensors: query, key, value and the gradient of the context.
        options: those of forward.
        inputs: from ``prepare``.
        softmax_max: from forward.
        softmax_sum: from forward.
        context: from forward.
        state: ``seed``, ``offset`` and ``numels`` from forward, and ``inner_precise``, ``sync``,
            ``gen_mask_parallel``.

    Returns:
        Gradients of queries, keys and values, None for that of the bias, and that of the sink or None.
    """
    import torch_npu

    layout, mask = options.layout, kernel_mask(inputs, options)
    dtype, widths = tensors[0].dtype, [tensor.shape[2:] for tensor in tensors[:3]]
    outer, context = tensors[3].to(dtype), context.to(dtype)
    query, key, value = tensors[:3]
    if layout == "SBND":
        query, key, value, outer, context = (t.flatten(2) for t in (query, key, value, outer, context))
    # A row without keys has no weights whatever its numbers; these do not divide by zero.
    nothing = softmax_sum <= 0
    maximum, total = (
        softmax_max.float().masked_fill(nothing, 0.0),
        softmax_sum.float().masked_fill(nothing, 1.0),
    )
    if layout == "TND" and needs_second_version(options):
        maximum, total = (in_sequences(number, inputs.attention.pieces) for number in (maximum, total))
    common = {
        **_common(inputs, options, mask),
        "softmax_max": maximum,
        "softmax_sum": total,
        "attention_in": context,
        "scale_value": options.scale,
        **state,
    }
    arguments = (query, key, value, outer, options.head_num, "SBH" if layout == "SBND" else layout)
    versions = torch_npu.npu_fusion_attention_grad, torch_npu.npu_fusion_attention_grad_v2
    found = list(_of_version(versions, options, mask, arguments, common))
    to_sink = None if options.sink is None else found[-1].to(options.sink.dtype)
    gradients = found[:3]
    if layout == "SBND":
        gradients = [part.unflatten(-1, width) for part, width in zip(gradients, widths)]
    # The kernel allocates a gradient of the bias and never writes it.
    return (*gradients, None, to_sink)


def in_tokens(number: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    """Return statistics that lie ``[n, s, 8]`` sequence by sequence as ``[t, n, 8]``."""
    heads, lanes = number.shape[1:]
    flat = number.reshape(-1, lanes)
    parts = [
        flat[piece.rows[0] * heads : piece.rows[1] * heads].view(heads, -1, lanes).transpose(0, 1)
        for piece in pieces
        if piece.visibility.sq
    ]
    return torch.cat(parts)


def in_sequences(number: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    """Return statistics ``[t, n, 8]`` as they lie sequence by sequence; the inverse of `in_tokens`."""
    parts = [
        number[slice(*piece.rows)].transpose(0, 1).reshape(-1, number.shape[2])
        for piece in pieces
        if piece.visibility.sq
    ]
    return torch.cat(parts).view(number.shape)


def needs_second_version(options: Options) -> bool:
    """Return whether the second version of the kernel is called.

    It alone knows kinds of biases and first positions, and the first one ignores a sink on Ascend 950.
    """
    starts = options.q_start_idx is not None or options.kv_start_idx is not None
    return (options.pse is not None and options.pse_type != 1) or starts or options.sink is not None


def kernel_mask(inputs: Inputs, options: Options) -> KernelMask:
    """Return the mask of an attention in the form that the kernel takes."""
    mode, device = options.sparse_mode, inputs.query.device
    pieces = inputs.attention.pieces
    empty = options.sink is None and any(piece.visibility.may_see_nothing for piece in pieces)
    if mode in (4, 7, 8):
        return KernelMask(mode, STORE.causal(device), options.pre_tokens, options.next_tokens, empty)
    if mode in (2, 3):
        return KernelMask(mode, STORE.causal(device), UNLIMITED, 0, empty)
    if mode == 6:
        return KernelMask(mode, STORE.prefix(device), empty_rows=empty)
    if options.layout == "TND":
        return KernelMask(0)
    return _explicit(pieces[0].visibility, options, inputs.query, empty)


def _explicit(seen: Visibility, options: Options, query: Tensor, empty: bool) -> KernelMask:
    """Return a mask of every query and key: one that was given, with its limits, or of a prefix."""
    if seen.hidden is None and options.sparse_mode != 5:
        return KernelMask(0)
    batch, heads, device = query.shape[0], query.shape[1], query.device
    band = seen.left is not None or seen.right is not None
    if seen.hidden is not None and not band:
        hidden = seen.hidden
    else:
        visible = seen.block((0, seen.sq), (0, seen.sk), device)
        hidden = torch.zeros(1, 1, seen.sq, seen.sk, dtype=torch.bool, device=device)
        hidden = hidden if visible is None else ~visible
    if options.sparse_mode == 5:
        return KernelMask(5, hidden.expand(batch, -1, -1, -1), empty_rows=empty)
    if hidden.shape[1] > 1:
        hidden = hidden.expand(batch, heads, -1, -1)
    # With limits the kernel leaves out what lies beyond them; it takes no negative ones of every kind.
    if band and min(options.pre_tokens, options.next_tokens) >= 0:
        return KernelMask(0, hidden, options.pre_tokens, options.next_tokens, empty)
    return KernelMask(1, hidden, empty_rows=empty)


def _precise(switches: Mapping[str, Any], mask: KernelMask) -> dict[str, Any]:
    return {**switches, "inner_precise": _ZERO_EMPTY_ROWS} if mask.empty_rows else dict(switches)


def _common(inputs: Inputs, options: Options, mask: KernelMask) -> dict[str, Any]:
    """Return the arguments that forward and backward spell alike."""
    count = len(inputs.attention.pieces) if options.layout == "TND" else None
    found: dict[str, Any] = {
        "pse": _pse(inputs, options),
        "atten_mask": mask.mask,
        "keep_prob": options.keep_prob,
        "prefix": (_list(options.prefix) or [])[:count] if mask.mode in (5, 6) else None,
        "sparse_mode": mask.mode,
    }
    if options.sink is not None:
        found["sink"] = options.sink.float()
    if options.layout == "TND":
        found |= {name: _list(getattr(options, name)) for name in ("actual_seq_qlen", "actual_seq_kvlen")}
        if not needs_second_version(options):
            found["softmax_layout"] = "TND"
    return found


def _of_version(
    versions: tuple[Callable[..., Any], Callable[..., Any]],
    options: Options,
    mask: KernelMask,
    arguments: tuple[Any, ...],
    common: Mapping[str, Any],
) -> Any:
    """Call the first of two versions of a kernel, or the second where it has to be.

    They spell the limits of bands differently, and only the second takes a kind of bias and first positions.
    """
    first_version, second_version = versions
    if not needs_second_version(options):
        limits = {"pre_tockens": mask.pre, "next_tockens": mask.following}
        return first_version(*arguments, **limits, **common)
    starts = {"q_start_idx": [first(options.q_start_idx)], "kv_start_idx": [first(options.kv_start_idx)]}
    return second_version(
        *arguments,
        pre_tokens=mask.pre,
        next_tokens=mask.following,
        pse_type=1 if options.pse is None else options.pse_type,
        **starts,
        **common,
    )


def _list(values: Any) -> list[int] | None:
    return None if values is None else numbers(values)


def _pse(inputs: Inputs, options: Options) -> Tensor | None:
    pse, query = options.pse, inputs.query
    if pse is None:
        return None
    if options.pse_type in (2, 3):
        if pse.dim() == 1:
            return pse.float()
        samples = len(inputs.attention.pieces) if options.layout == "TND" else query.shape[0]
        return (pse[0] if pse.shape[0] == 1 else pse[:samples]).float()
    if options.layout == "TND":
        # The kernel takes the scores' biases of all sequences in a row.
        bias = Bias(pse)
        parts = [
            bias.block((0, piece.visibility.sq), (0, piece.visibility.sk), piece.visibility.sq, piece.sample)
            .expand(1, -1, piece.visibility.sq, -1)
            .reshape(-1)
            for piece in inputs.attention.pieces
        ]
        return torch.cat(parts).to(query.dtype)
    if pse.shape[2] == 1 and query.shape[2] > 1:
        pse = pse.expand(query.shape[0], -1, -1, -1)
    return pse.to(query.dtype)

"""The arguments of fused attention, checked and turned into views and an `AttentionCall`.

Messages name the argument, what it must be, what it is, and the nearest supported choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.attention.bias import Bias, compressed
from mindspeed_kernels.attention.blocks import AttentionCall, Piece
from mindspeed_kernels.attention.layouts import RANKS, heads_of, to_bnsd
from mindspeed_kernels.attention.visibility import MODES, UNLIMITED, of_mode, of_sequence
from mindspeed_kernels.contract import ContractError

OPERATOR = "npu_fusion_attention"
SWITCHES = {"inner_precise": 0, "gen_mask_parallel": True, "sync": False}
"""Options of the kernels that change nothing about the result, with their defaults."""
MASKED_MODES = (0, 1, 5)
"""The sparse modes that take a mask of every query and key; the others make theirs."""


@dataclass(frozen=True)
class Options:
    """The options of fused attention, see `npu_fusion_attention`."""

    head_num: int
    input_layout: str
    pse: Tensor | None = None
    atten_mask: Tensor | None = None
    scale: float = 1.0
    keep_prob: float = 1.0
    pre_tokens: int = UNLIMITED
    next_tokens: int = UNLIMITED
    prefix: Sequence[int] | Tensor | None = None
    actual_seq_qlen: Sequence[int] | Tensor | None = None
    actual_seq_kvlen: Sequence[int] | Tensor | None = None
    sparse_mode: int = 0
    pse_type: int = 1
    q_start_idx: Sequence[int] | int | None = None
    kv_start_idx: Sequence[int] | int | None = None
    sink: Tensor | None = None
    dropout_mask: Tensor | None = None

    @property
    def layout(self) -> str:
        """Return the layout in capitals."""
        return self.input_layout.upper()


@dataclass(frozen=True)
class Inputs:
    """Queries, keys and values as views ``[b, n, s, d]``, and everything else.

    Attributes:
        query: ``[b, n, sq, d]``.
        key: ``[b, g, sk, d]``.
        value: ``[b, g, sk, dv]``.
        attention: sequences, masks, bias, dropout.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attention: AttentionCall


def refuse(argument: str, rule: str, got: Any, nearest: Any) -> ContractError:
    """Build the error about an argument."""
    return ContractError(f"{OPERATOR}[any]: {argument} {rule}, got {got}; nearest supported: {nearest}")


def options_of(head_num: int, input_layout: str, **given: Any) -> Options:
    """Return the options among the operator's keyword arguments, without those that only kernels know.

    Raises:
        ContractError: there is a padding mask.
    """
    if given.pop("padding_mask", None) is not None:
        raise refuse("padding_mask", "must be None", "a tensor", "atten_mask")
    return Options(
        head_num, input_layout, **{name: value for name, value in given.items() if name not in SWITCHES}
    )


def kernel_switches(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that only kernels know, with their defaults."""
    return {name: given.get(name, default) for name, default in SWITCHES.items()}


def views(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as ``[b, n, s, d]``.

    Raises:
        ContractError: layout, heads or sizes do not fit together.
    """
    layout, heads = options.layout, options.head_num
    if layout not in RANKS:
        raise refuse("input_layout", f"must be one of {', '.join(RANKS)}", repr(options.input_layout), "SBH")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != RANKS[layout]:
            shape = tuple(tensor.shape)
            raise refuse(name, f"has {RANKS[layout]} dimensions in layout {layout}", shape, RANKS[layout])
    if heads < 1 or (layout in ("SBH", "BSH") and query.shape[2] % heads):
        raise refuse("head_num", "divides the last size of query", f"{heads} and {query.shape[-1]}", 1)
    query_view = to_bnsd(query, layout, heads)
    if query_view.shape[1] != heads:
        raise refuse("head_num", "is the number of heads of query", heads, query_view.shape[1])
    width = query_view.shape[3]
    groups = heads_of(key, layout, width)
    if not groups or heads % groups or (layout in ("SBH", "BSH") and key.shape[2] % width):
        raise refuse("key", f"has a number of heads that divides {heads}", groups, 1)
    if layout in ("SBH", "BSH") and value.shape[2] % groups:
        raise refuse("value", f"has the {groups} heads of key", tuple(value.shape), groups * width)
    key_view, value_view = to_bnsd(key, layout, groups), to_bnsd(value, layout, groups)
    if key_view.shape[3] != width:
        raise refuse("key", "has heads as wide as query", key_view.shape[3], width)
    if key_view.shape[0] != query_view.shape[0] or value_view.shape[:3] != key_view.shape[:3]:
        shapes = tuple(key.shape), tuple(value.shape)
        raise refuse(
            "value", "shares batch, heads and length with key, and batch with query", shapes, key.shape
        )
    if value_view.shape[3] > width:
        raise refuse("value", "has heads no wider than query", value_view.shape[3], width)
    return query_view, key_view, value_view


def prepare(query: Tensor, key: Tensor, value: Tensor, options: Options, seed: int = 0) -> Inputs:
    """Check all arguments and describe the attention.

    Raises:
        ContractError: an argument is not supported.
    """
    q, k, v = views(query, key, value, options)
    check_numbers(options)
    pieces = _packed(q, k, options) if options.layout == "TND" else _single(q, k, options)
    kept, shape = options.dropout_mask, (*q.shape[:3], k.shape[2])
    if kept is not None and kept.shape != shape:
        raise refuse("dropout_mask", "has one value per score", tuple(kept.shape), shape)
    kept = None if kept is None else kept.bool()
    bias = _bias(q, k, options)
    return Inputs(q, k, v, AttentionCall(pieces, options.scale, bias, options.keep_prob, seed, kept))


def check_numbers(options: Options) -> None:
    """Check what does not depend on tensors.

    Raises:
        ContractError: an argument is not supported.
    """
    mode, layout = options.sparse_mode, options.layout
    if mode not in MODES:
        raise refuse("sparse_mode", "must be 0 to 8", mode, min(max(mode, 0), 8))
    if not 0.0 < options.keep_prob <= 1.0:
        raise refuse("keep_prob", "must be above 0 and at most 1", options.keep_prob, 1.0)
    if options.pse_type not in (0, 1, 2, 3):
        raise refuse("pse_type", "must be 0, 1, 2 or 3", options.pse_type, 1)
    if mode in (7, 8) and layout != "TND":
        raise refuse("sparse_mode", f"{mode} is for layout TND", layout, {7: 3, 8: 2}[mode])
    if mode in (7, 8) and options.pse is not None:
        raise refuse("pse", f"must be None in sparse_mode {mode}", "a tensor", None)
    if mode == 5 and layout == "TND":
        raise refuse("sparse_mode", "5 is not for layout TND", mode, 6)
    if mode in (5, 6) and options.prefix is None:
        raise refuse(
            "prefix", f"must be given in sparse_mode {mode}", None, "one number per sample, or mode 3"
        )
    if mode in (0, 4, 7, 8):
        _check_band(options)


def _check_band(options: Options) -> None:
    """Refuse a negative limit, unless the other one reaches at least as far."""
    pre, following = options.pre_tokens, options.next_tokens
    if pre + following < 0:
        rule = "must reach at least as far as the other limit is negative"
        raise refuse("pre_tokens and next_tokens", rule, (pre, following), (pre, max(following, -pre)))


def numbers(values: Sequence[int] | Tensor) -> list[int]:
    """Return integers that callers write as a list or as a tensor."""
    return [int(v) for v in (values.tolist() if isinstance(values, Tensor) else values)]


def _single(query: Tensor, key: Tensor, options: Options) -> tuple[Piece, ...]:
    sq, sk = query.shape[2], key.shape[2]
    prefix: tuple[int, ...] = ()
    if options.sparse_mode in (5, 6):
        assert options.prefix is not None
        prefix = tuple(numbers(options.prefix))
        if len(prefix) != query.shape[0]:
            raise refuse("prefix", "has one number per sample", len(prefix), query.shape[0])
        wrong = [n for n in prefix if not max(0, sk - sq) <= n <= sk]
        if wrong:
            low = max(0, sk - sq)
            raise refuse("prefix", f"must be {low} to {sk}", wrong[0], min(max(wrong[0], low), sk))
    pre, following, hidden = options.pre_tokens, options.next_tokens, _hidden(query, key, options)
    mode = options.sparse_mode
    visibility = of_mode(mode, sq, sk, pre=pre, following=following, prefix=prefix, hidden=hidden)
    return (Piece((0, sq), (0, sk), visibility),)


def _hidden(query: Tensor, key: Tensor, options: Options) -> Tensor | None:
    mask = options.atten_mask
    if mask is None or options.sparse_mode not in (0, 1):
        return None
    if mask.dtype not in (torch.bool, torch.uint8):
        raise refuse("atten_mask", "must be bool or uint8, True hides", mask.dtype, "bool")
    size = (query.shape[2], key.shape[2])
    if mask.dim() not in (2, 4) or tuple(mask.shape[-2:]) != size:
        rule = "has 2 or 4 dimensions, the last two those of the scores; expand others before the call"
        raise refuse("atten_mask", rule, tuple(mask.shape), size)
    mask = mask.bool()
    if mask.dim() == 2:
        return mask[None, None]
    if mask.shape[0] not in (1, query.shape[0]) or mask.shape[1] not in (1, query.shape[1]):
        rule = "broadcasts over samples and heads"
        raise refuse("atten_mask", rule, tuple(mask.shape), (query.shape[0], 1, *size))
    return mask


def _packed(query: Tensor, key: Tensor, options: Options) -> tuple[Piece, ...]:
    query_ends, key_ends = sequence_ends(options, query.shape[2], key.shape[2])
    pre, following = options.pre_tokens, options.next_tokens
    prefix = numbers(options.prefix) if options.prefix is not None else []
    filled = [index for index, (before, end) in enumerate(pairwise([0, *query_ends])) if before < end]
    pieces, row, column = [], 0, 0
    for index, (row_end, column_end) in enumerate(zip(query_ends, key_ends)):
        sq, sk = row_end - row, column_end - column
        if sq and not sk:
            raise refuse("actual_seq_kvlen", f"sequence {index} has {sq} queries and needs keys", 0, 1)
        if not (sq and sk) and options.pse is not None:
            raise refuse("pse", "must be None where a sequence is empty", f"sequence {index}", None)
        mode = of_sequence(options.sparse_mode, index, filled)
        leading = (prefix[index],) if prefix else ()
        visibility = of_mode(mode, sq, sk, pre=pre, following=following, prefix=leading)
        pieces.append(Piece((row, row_end), (column, column_end), visibility, index))
        row, column = row_end, column_end
    return tuple(pieces)


def sequence_ends(options: Options, queries: int, keys: int) -> tuple[list[int], list[int]]:
    """Return where each packed sequence ends, without a leading zero and without trailing ones.

    Ends that trail with zeros leave the last sequences and their tokens out.

    Raises:
        ContractError: they are missing, decrease, or neither end with the tensors nor trail with zeros.
    """
    named = {"actual_seq_qlen": options.actual_seq_qlen, "actual_seq_kvlen": options.actual_seq_kvlen}
    totals, ends = (queries, keys), []
    for (name, values), total in zip(named.items(), totals):
        if values is None:
            raise refuse(name, "must be given in layout TND", None, [total])
        ends.append(numbers(values))
    trailing = trailing_zeros(*ends) if max(totals) else 0
    for (name, values), total in zip(zip(named, ends), totals):
        found = values[: len(values) - trailing]
        fits = (trailing and (not found or found[-1] <= total)) or (found and found[-1] == total)
        if not fits or any(late < early for early, late in pairwise([0, *found])):
            shown = values if len(values) < 9 else [*values[:4], "...", *values[-4:]]
            rule = f"must not decrease and end with {total}"
            raise refuse(name, rule, shown, f"[{total}], or zeros behind the last end")
    if len(ends[0]) != len(ends[1]):
        rule = "has as many sequences as actual_seq_qlen"
        raise refuse("actual_seq_kvlen", rule, len(ends[1]), len(ends[0]))
    if options.sparse_mode in MASKED_MODES and options.atten_mask is not None:
        raise refuse(
            "atten_mask", f"must be None in layout TND and sparse_mode {options.sparse_mode}", "a mask", 3
        )
    count = len(ends[0]) - trailing
    return ends[0][:count], ends[1][:count]


def trailing_zeros(query_ends: Sequence[int], key_ends: Sequence[int]) -> int:
    """Return how many pairs of zeros two lists of ends trail with."""
    count = 0
    for pair in zip(reversed(query_ends), reversed(key_ends)):
        if pair != (0, 0):
            break
        count += 1
    return count


def _bias(query: Tensor, key: Tensor, options: Options) -> Bias | None:
    pse = options.pse
    if pse is None:
        return None
    batch, heads, sq, sk = *query.shape[:3], key.shape[2]
    if options.pse_type in (2, 3):
        slopes = pse if pse.dim() == 2 else pse[None]
        if slopes.dim() != 2 or slopes.shape[1] != heads:
            rule = "holds one slope per head, [n] or [b, n], for pse_type 2 and 3"
            raise refuse("pse", rule, tuple(pse.shape), (heads,))
        if pse.requires_grad:
            raise refuse("pse", "has no gradient for pse_type 2 and 3", "requires_grad", "pse.detach()")
        wide = torch.promote_types(query.dtype, torch.float32)
        start = first(options.q_start_idx) - first(options.kv_start_idx)
        return Bias(slopes=slopes.to(wide), root=options.pse_type == 3, start=start)
    if pse.dim() != 4 or pse.shape[1] != heads or (pse.shape[3] != sk and options.layout != "TND"):
        raise refuse("pse", "has one bias per head and score", tuple(pse.shape), (batch, heads, sq, sk))
    if options.layout != "TND":
        folded = compressed(pse, sq)
        if folded and (sq != sk or options.sparse_mode not in (0, 2, 3)):
            rule = "holds only the last rows, which needs as many queries as keys and sparse_mode 0, 2 or 3"
            raise refuse(
                "pse", rule, f"sparse_mode {options.sparse_mode}, {sq} x {sk}", (batch, heads, sq, sk)
            )
        if not folded and pse.shape[2] not in (1, sq):
            raise refuse("pse", "has one bias per head and score", tuple(pse.shape), (batch, heads, sq, sk))
        if folded and pse.requires_grad:
            raise refuse("pse", "has no gradient in compressed form", "requires_grad", "pse.detach()")
    elif pse.requires_grad:
        raise refuse("pse", "has no gradient in layout TND", "requires_grad", "pse.detach()")
    return Bias(pse, options.scale if options.pse_type == 1 else 1.0)


def first(value: Sequence[int] | int | None) -> int:
    """Return a start index, which callers write as a number or as a list with one."""
    if value is None:
        return 0
    return int(value) if isinstance(value, int) else int(value[0])

"""Rules of fused attention on the device for its arguments, in the order in which it checks them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.attention_call import (
    ALIBI_ROWS,
    LANES,
    PREFIX_ROWS,
    RANKS,
    TRIANGLE,
    AttentionCall,
    Sequence,
    each,
)
from mindspeed_testing.npu.kernels.contract import Rule

FLOATING = (torch.float16, torch.bfloat16, torch.float32)
BEFORE_950 = ("910B", "910_93")
_MOST_HEADS, _WIDEST, _MOST_SEQUENCES, _MOST_PREFIXES = 256, 768, 1024, 32
_LONGEST = 1 << 20


def _ranks(c: AttentionCall) -> bool:
    return all(c.a[name].dim() == RANKS[c.layout] for name in ("query", "key", "value"))


def _heads(c: AttentionCall) -> bool:
    query = c.a["query"]
    if c.layout in ("BSH", "SBH"):
        return bool(query.shape[2] % c.heads == 0 and c.groups and c.heads % c.groups == 0)
    own = query.shape[{"BNSD": 1, "BSND": 2, "TND": 1}[c.layout]]
    return bool(own == c.heads and c.groups and c.heads % c.groups == 0)


def _value_width(c: AttentionCall) -> int:
    size = c.a["value"].shape[-1]
    return int(size // c.groups) if c.layout in ("BSH", "SBH") else int(size)


def _widths(c: AttentionCall) -> bool:
    same = c.layout in ("BSH", "SBH") or c.a["key"].shape[-1] == c.width
    return bool(same and 0 < _value_width(c) <= c.width <= _WIDEST)


def _alike(c: AttentionCall) -> bool:
    key, value, query = (c.a[name].shape for name in ("key", "value", "query"))
    batch = {"SBH": 1, "BSH": 0, "BNSD": 0, "BSND": 0}.get(c.layout)
    return key[:-1] == value[:-1] and (batch is None or query[batch] == key[batch])


def _mode(c: AttentionCall) -> bool:
    return c.mode in ((0, 1, 2, 3, 4, 6, 7, 8) if c.packed else range(7))


def _ends_given(c: AttentionCall) -> bool:
    queries, keys = c.a["actual_seq_qlen"], c.a["actual_seq_kvlen"]
    if not c.packed:
        return not queries and not keys
    return bool(queries and keys and len(queries) == len(keys) <= _MOST_SEQUENCES)


def _ends(c: AttentionCall) -> bool:
    if not c.packed:
        return True
    shorter = []
    for name, side, total in (("actual_seq_qlen", 0, c.sizes[1]), ("actual_seq_kvlen", 1, c.sizes[2])):
        ends = list(c.a[name])
        while ends and ends[-1] == 0:
            ends.pop()
        used = sum(pair[side] for pair in c.lengths)
        if any(late < early for early, late in zip([0, *ends], ends)) or used > total:
            return False
        shorter.append(used < total and c.a[name][-1] != 0)
    # Tokens behind the last sequence need trailing zeros; of one side alone nobody notices them.
    return not all(shorter)


def _pse_shape(c: AttentionCall) -> bool:
    pse: Tensor | None = c.a["pse"]
    if pse is None:
        return c.pse_type == 1
    batch, s1, s2 = c.sizes
    if c.pse_type in (2, 3):
        samples = len(c.lengths) if c.packed else batch
        return tuple(pse.shape) in ((c.heads,), (samples, c.heads))
    if c.packed:
        longest = max(keys for _, keys in c.lengths)
        alibi = tuple(pse.shape[1:]) == (c.heads, ALIBI_ROWS, longest) and pse.shape[0] in (1, len(c.lengths))
        keys = sum(keys for _, keys in c.lengths)
        return (pse.dim() == 1 and pse.numel() in (c.weights, c.heads * keys)) or alibi
    if pse.dim() != 4 or pse.shape[0] not in (1, batch) or pse.shape[1] != c.heads or pse.shape[3] != s2:
        return False
    return pse.shape[2] in (1, s1) or (pse.shape[2] == ALIBI_ROWS <= s1 and s1 == s2)


def _pse_dtype(c: AttentionCall) -> bool:
    pse = c.a["pse"]
    wanted = torch.float32 if c.pse_type in (2, 3) else c.a["query"].dtype
    return pse is None or pse.dtype == wanted


def _slopes(c: AttentionCall) -> bool:
    if c.a["pse"] is None or c.pse_type not in (2, 3):
        return True
    return all(item.s1 == item.s2 for item in c.sequences)


def _mask_shape(c: AttentionCall) -> bool:
    mask = c.mask
    if mask is None:
        return True
    if mask.dim() not in (2, 4) or (c.packed and mask.dim() != 2):
        return False
    batch, s1, s2 = c.sizes
    if c.mode in (2, 3, 4, 7, 8):
        return tuple(mask.shape[-2:]) == (TRIANGLE, TRIANGLE)
    if c.mode == 6:
        return tuple(mask.shape[-2:]) == (PREFIX_ROWS, TRIANGLE)
    if c.packed:
        longest = tuple(max(pair[side] for pair in c.lengths) for side in (0, 1))
        whole = tuple(sum(pair[side] for pair in c.lengths) for side in (0, 1))
        return tuple(mask.shape) in (longest, whole)
    leading = ((1, 1), (batch, 1), (batch, c.heads))
    return tuple(mask.shape[-2:]) == (s1, s2) and (mask.dim() == 2 or tuple(mask.shape[:2]) in leading)


def _mask_values(c: AttentionCall) -> bool:
    """Judge what the kernel cannot check: that the mask is the one that its mode and limits say."""
    mask = c.mask
    if mask is None or c.mode == 1:
        return True
    hidden = mask.bool()
    if c.mode in (2, 3, 4, 6, 7, 8):
        wanted = torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool).triu(1)
        if c.mode == 6:
            tail = torch.zeros(PREFIX_ROWS - TRIANGLE, TRIANGLE, dtype=torch.bool)
            tail[:, TRIANGLE // 2 :] = True
            wanted = torch.cat((wanted, tail))
        return bool((hidden == wanted).all())
    for item in c.sequences:
        seen = c.visible(item)
        assert seen is not None
        step = torch.arange(item.s2)[None] - torch.arange(item.s1)[:, None]
        if c.mode == 0:
            outside = (step < -c.pre) | (step > c.following)
            if bool((seen & outside).any()):
                return False
        elif not bool((seen == _prefixed(c, item, step)).all()):
            return False
    return True


def _prefixed(c: AttentionCall, item: Sequence, step: Tensor) -> Tensor:
    return (step <= item.s2 - item.s1) | (torch.arange(item.s2) < c.prefix_of(item))[None]


def _prefix(c: AttentionCall) -> bool:
    prefix = c.a["prefix"]
    if c.mode not in (5, 6) or c.mask is None:
        return True
    count = len(c.lengths) if c.packed else c.sizes[0]
    if not prefix or len(prefix) != count or (not c.packed and count > _MOST_PREFIXES):
        return False
    if c.mode == 5 and c.sizes[0] > 1 and c.mask.dim() == 2:
        return False
    return all(max(0, item.s2 - item.s1) <= c.prefix_of(item) <= item.s2 for item in c.sequences)


def _band(c: AttentionCall) -> bool:
    if c.mask is None or c.mode not in (0, 4) or c.packed:
        return True
    _, s1, s2 = c.sizes
    pre, following = c.pre, c.following
    if c.mode == 4:
        pre, following = pre + s1 - s2, following + s2 - s1
    if pre >= 0 and following >= 0:
        return True
    if pre < 0 <= following:
        return following >= -pre and -pre < s2
    return following < 0 <= pre and -following <= pre and -following < s1


def _packed_rows(c: AttentionCall) -> bool:
    """Judge the limits of packed sequences, which must leave every query a key."""
    if c.mask is None or not c.packed:
        return True
    filled = [item for item in c.sequences if item.s1 and item.s2]
    if c.mode == 3:
        return all(item.s1 <= item.s2 for item in c.sequences)
    if c.mode == 4:
        band = c.pre >= 0 and c.pre + c.following >= 0
        return band and all(item.s1 - c.following <= item.s2 for item in filled)
    if c.mode not in (7, 8):
        return c.mode != 0 or _packed_limits(c, filled)
    special = [item for item in filled if c.mode_of(item) == 4]
    fits = all(item.s1 - c.following <= item.s2 and c.pre >= item.s2 for item in special)
    if c.mode == 7:
        return fits and c.following <= 0 and all(item.s1 <= item.s2 for item in filled)
    return fits


def _packed_limits(c: AttentionCall, filled: list[Sequence]) -> bool:
    longest = [max(pair[side] for pair in c.lengths) for side in (0, 1)]
    if c.pre >= longest[0] and (c.following == 0 or c.following >= longest[1]):
        return True
    if c.following < 0 or (c.pre < 0 and c.following < -c.pre):
        return False
    return all(item.s2 + c.pre >= item.s1 for item in filled)


def _packed_mask_rows(c: AttentionCall) -> bool:
    if c.mask is None or not c.packed:
        return True
    return all(bool(seen.any(-1).all()) for item in c.sequences if (seen := c.visible(item)) is not None)


def _empty_sequences(c: AttentionCall) -> bool:
    if not c.packed:
        return True
    if any(item.s1 and not item.s2 for item in c.sequences):
        return False
    return c.a["pse"] is None or all(item.s1 and item.s2 for item in c.sequences)


def _drop_mask(c: AttentionCall) -> bool:
    mask = c.get("dropout_mask")
    return mask is None or (mask.dtype == torch.uint8 and mask.numel() * 8 >= c.weights)


def _sink(c: AttentionCall) -> bool:
    sink = c.a["sink"]
    return sink is None or (sink.dtype == torch.float32 and tuple(sink.shape) == (c.heads,))


def _softmax_layout(c: AttentionCall) -> bool:
    layout = c.a["softmax_layout"]
    return layout == "" or (layout == "TND" and c.a["input_layout"] == "TND")


COMMON = (
    Rule(
        "input_layout is BSH, SBH, BNSD, BSND or TND, in any case",
        lambda a: a["input_layout"].upper() in RANKS,
    ),
    Rule("query, key and value have the dimensions of the layout", each(_ranks)),
    Rule(
        "query, key and value are float16, bfloat16 or float32, all alike",
        lambda a: a["query"].dtype in FLOATING and a["query"].dtype == a["key"].dtype == a["value"].dtype,
    ),
    Rule("head_num is above 0 and at most 256", lambda a: 0 < a["head_num"] <= _MOST_HEADS),
    Rule("query has head_num heads, a multiple of those of key", each(_heads)),
    Rule("heads of query and key are alike, those of value no wider, of 1 to 768", each(_widths)),
    Rule("key and value agree in all but the width, and in the batch with query", each(_alike)),
    Rule("keep_prob is above 0 and at most 1", lambda a: 0.0 < a["keep_prob"] <= 1.0),
    Rule("sparse_mode is 0 to 6, for TND 0 to 4 and 6 to 8", each(_mode)),
    Rule("padding_mask is None", lambda a: a["padding_mask"] is None),
    Rule("sequences have at most 1 Mi tokens", each(lambda c: max(c.sizes) <= _LONGEST)),
    Rule("TND alone has both lists of ends, equally long, of at most 1024", each(_ends_given)),
    Rule("ends do not decrease and stay in the tensors; tokens behind them need trailing zeros", each(_ends)),
    Rule("a packed sequence with queries has keys, and with pse none is empty", each(_empty_sequences)),
    Rule("softmax_layout is empty, or TND where the layout is", each(_softmax_layout)),
    Rule("pse_type is 0 to 3", each(lambda c: c.pse_type in range(4))),
    Rule(
        "pse is [b | 1, n, s1 | 1, s2] or the last 1024 rows of equally many queries and keys, TND "
        "[sum n s1 s2], of pse_type 2 and 3 [n] or [b, n]; without pse, pse_type is 1",
        each(_pse_shape),
    ),
    Rule("pse has the dtype of query, of pse_type 2 and 3 float32", each(_pse_dtype)),
    Rule("pse_type 2 and 3 need as many queries as keys", each(_slopes)),
    Rule("pse is None in sparse_mode 7 and 8", lambda a: a["pse"] is None or a["sparse_mode"] < 7),
    Rule(
        "atten_mask is bool or uint8",
        lambda a: a["atten_mask"] is None or a["atten_mask"].dtype in (torch.bool, torch.uint8),
    ),
    Rule(
        "atten_mask is [s1, s2], [1, 1, s1, s2], [b, 1, s1, s2] or [b, n, s1, s2]; [2048, 2048] in modes 2 "
        "to 4, 7 and 8, [3072, 2048] in mode 6; TND [longest s1, longest s2]",
        each(_mask_shape),
    ),
    Rule("prefix has one number a sample, at most 32, of max(0, s2 - s1) to s2", each(_prefix)),
    Rule("atten_mask hides what mode, prefix and limits hide", each(_mask_values), of_values=True),
    Rule("pre_tokens and next_tokens leave something to see", each(_band)),
    Rule("every packed query sees a key by mode and limits", each(_packed_rows)),
    Rule("every packed query sees a key by the mask", each(_packed_mask_rows), of_values=True),
    Rule("sink is float32 [n]", each(_sink)),
)

FORWARD = (
    *COMMON,
    Rule("dropout_mask is uint8 with a bit a weight", each(_drop_mask)),
)


def _statistics(c: AttentionCall) -> bool:
    batch, s1, _ = c.sizes
    shape = (s1, c.heads, LANES) if c.packed else (batch, c.heads, s1, LANES)
    found = [c.a[name] for name in ("softmax_max", "softmax_sum")]
    return all(
        item is not None and item.dtype == torch.float32 and tuple(item.shape) == shape for item in found
    )


def _lanes(a: Any) -> bool:
    return all(
        torch.equal(item.nan_to_num(), item[..., :1].expand_as(item).nan_to_num())
        for item in (a["softmax_max"], a["softmax_sum"])
    )


def _contexts(c: AttentionCall) -> bool:
    query, dy, context = c.a["query"], c.a["dy"], c.a["attention_in"]
    last = c.heads * _value_width(c) if c.layout in ("BSH", "SBH") else _value_width(c)
    shape = (*query.shape[:-1], last)
    return context is not None and tuple(dy.shape) == tuple(context.shape) == shape


def _backward_pse(c: AttentionCall) -> bool:
    pse = c.a["pse"]
    if pse is None or c.packed or pse.dim() != 4:
        return True
    batch, s1, s2 = c.sizes
    if pse.shape[2] == ALIBI_ROWS < s1:
        causal = c.mode in (2, 3) or (c.following == 0 and c.pre >= s1)
        return s1 == s2 and causal
    return pse.shape[2] == s1 or pse.shape[0] == batch


def _numels(c: AttentionCall) -> bool:
    return c.keep >= 1.0 or c.weights <= c.a["numels"] <= max(c.numels, c.weights)


def _backward_band(c: AttentionCall) -> bool:
    if c.mask is None or not c.packed or c.mode not in (0, 4, 7, 8):
        return True
    return c.pre + c.following > 0


BACKWARD = (
    *COMMON,
    Rule(
        "query and key hold something",
        lambda a: min(a[name].numel() for name in ("query", "key")) > 0,
    ),
    Rule("softmax_max and softmax_sum are float32 [b, n, s1, 8], TND [t, n, 8]", each(_statistics)),
    Rule("each row's number stands in all 8 lanes", _lanes, of_values=True),
    Rule("dy and attention_in are like the context", each(_contexts)),
    Rule(
        "dy and attention_in have the dtype of query",
        lambda a: a["query"].dtype == a["dy"].dtype == a["attention_in"].dtype,
    ),
    Rule("pse of one row has the batch, and the last 1024 rows need a causal mode", each(_backward_pse)),
    Rule("pre_tokens + next_tokens is above 0 for packed bands", each(_backward_band)),
    Rule("numels is the number that forward returned", each(_numels), BEFORE_950),
    Rule(
        "query is float16 or bfloat16 where there is a sink",
        lambda a: a["sink"] is None or a["query"].dtype != torch.float32,
        BEFORE_950,
    ),
)

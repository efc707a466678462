"""Sorting tokens by a map of their experts and back, with the gradients of both.

Plain, row ``sorted_indices[t * k + j]`` is copy ``j`` of token ``t``; with ``drop_and_pad``, row ``i`` is
token ``sorted_indices[i]`` for expert ``i // capacity``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule, unwritten
from mindspeed_testing.npu.kernels.repositories import op_plugin, ops_transformer
from mindspeed_testing.npu.kernels.rules import of_dtypes, one_dtype

_SOCS = ("910B", "910_93")
_MOST_COPIES, _MOST = 511, 16777214
_MAPS = (torch.bool, torch.int8)


def _selected(routing_map: Tensor) -> list[list[int]]:
    """Return the experts of each token, ascending."""
    return [[e for e, on in enumerate(row) if on] for row in routing_map.tolist()]


def _ranked(routing_map: Tensor, capacity: int) -> list[tuple[int, int]]:
    """Return expert and token of each padded row: an expert's own tokens first, then the others."""
    columns = routing_map.t().tolist()
    rows = []
    for expert, column in enumerate(columns):
        ranked = sorted(range(len(column)), key=lambda token: not column[token])
        rows += [(expert, token) for token in ranked[:capacity]]
    return rows


def _by_expert(routing_map: Tensor) -> tuple[list[tuple[int, int]], list[int]]:
    """Return expert and token of each row, and the rows in the order of tokens."""
    experts = _selected(routing_map)
    rows = sorted((expert, token) for token, chosen in enumerate(experts) for expert in chosen)
    place = {pair: row for row, pair in enumerate(rows)}
    return rows, [place[expert, token] for token, chosen in enumerate(experts) for expert in chosen]


def _number(a: Arguments) -> int:
    given = a["num_out_tokens"]
    return a["tokens"].shape[0] if given is None else int(given)


def permute(a: Arguments) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return rows, their probabilities and int32 indices."""
    tokens, routing_map, probs = a["tokens"], a["routing_map"], a["probs"]
    parts = routing_map.shape[1 if a["drop_and_pad"] else 0]
    of_each = _number(a) // parts
    if not (of_each and tokens.numel()):
        count = of_each * parts
        weights = None if probs is None else unwritten((count,), probs.dtype)
        rows = unwritten((count, tokens.shape[1]), tokens.dtype)
        return rows, weights, unwritten((count,), torch.int32)
    if a["drop_and_pad"]:
        pairs = _ranked(routing_map, of_each)
        indices = [token for _, token in pairs]
    else:
        pairs, indices = _by_expert(routing_map)
    experts, sources = (torch.tensor(part) for part in zip(*pairs))
    weights = None if probs is None else probs[sources, experts]
    return tokens[sources], weights, torch.tensor(indices, dtype=torch.int32)


def _pairs(a: Arguments, count: int) -> Iterator[tuple[int, int, int]]:
    """Return row, token and expert of each copy; the expert is -1 where the map is not given."""
    indices, routing_map = a["sorted_indices"].tolist(), a["routing_map"]
    if a["drop_and_pad"]:
        experts = 1 if routing_map is None else routing_map.shape[1]
        capacity = max(1, len(indices) // experts)
        yield from ((row, token, row // capacity) for row, token in enumerate(indices))
        return
    copies = max(1, len(indices) // count)
    chosen = None if routing_map is None else _selected(routing_map)
    for place, row in enumerate(indices):
        token, copy = divmod(place, copies)
        yield row, token, -1 if chosen is None else chosen[token][copy]


def permute_grad(a: Arguments) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of tokens ``[T, h]`` and, given those of its copies, of probabilities."""
    rows, weights, count = a["permuted_token_out_grad"], a["probs_grad"], a["tokens_num"]
    to_tokens = torch.zeros(count, rows.shape[1], dtype=torch.float64)
    to_probs = None if weights is None else torch.zeros(count, a["experts_num"], dtype=weights.dtype)
    for row, token, expert in _pairs(a, count):
        to_tokens[token] += rows[row].double()
        if to_probs is not None:
            to_probs[token, expert] = weights[row]
    return to_tokens.to(rows.dtype), to_probs


def unpermute(a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return tokens, what backward needs of the indices with ``drop_and_pad``, and sorted probabilities."""
    rows, indices, probs = a["permuted_tokens"], a["sorted_indices"], a["probs"]
    nothing = unwritten(indices.shape, indices.dtype)
    weights = None if probs is None else unwritten(indices.shape, probs.dtype)
    if not (rows.numel() and indices.numel()):
        return unwritten(tuple(a["restore_shape"]), rows.dtype), nothing, nothing.clone(), weights
    result = torch.zeros(tuple(a["restore_shape"]), dtype=torch.float64)
    for row, token, expert in _pairs(a, a["restore_shape"][0]):
        weight = 1.0
        if weights is not None:
            weights[row] = probs[token, expert]
            weight = float(probs[token, expert])
        result[token] += weight * rows[row].double()
    if not a["drop_and_pad"]:
        return result.to(rows.dtype), nothing, nothing.clone(), weights
    tokens, order = indices.sort(stable=True)
    return result.to(rows.dtype), order.to(torch.int32), tokens, weights


def unpermute_grad(a: Arguments) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of rows and, where there are any, of probabilities."""
    gradient, probs, rows = a["unpermuted_tokens_grad"].double(), a["probs"], a["permuted_tokens"]
    dtype = a["unpermuted_tokens_grad"].dtype
    places = a["out_index"].tolist()
    to_rows = unwritten((len(places), gradient.shape[1]), dtype)
    to_probs = None if probs is None else torch.zeros(probs.shape, dtype=dtype)
    copies = max(1, len(places) // gradient.shape[0])
    chosen = None if probs is None or a["drop_and_pad"] else _selected(a["routing_map"])
    for place, row in enumerate(places):
        token = int(a["permuted_token_id"][place]) if a["drop_and_pad"] else place // copies
        weight = 1.0
        if probs is not None and to_probs is not None:
            if chosen is None:
                expert = row // (len(places) // probs.shape[1])
            else:
                expert = chosen[token][place % copies]
            weight = float(probs[token, expert])
            to_probs[token, expert] = (rows[row].double() @ gradient[token]).to(dtype)
        to_rows[row] = (weight * gradient[token]).to(dtype)
    return to_rows, to_probs


def _rows_alike(a: Arguments, copies: int) -> bool:
    return bool((a["routing_map"].bool().sum(1) == copies).all())


def _copies_of_probs(a: Arguments) -> int:
    return int(a["sorted_indices"].numel() // a["probs"].shape[0])


def _number_fits(a: Arguments) -> bool:
    tokens, experts = a["routing_map"].shape
    number = _number(a)
    of_each = tokens if a["drop_and_pad"] else experts
    return 0 <= number <= tokens * experts and number // (experts if a["drop_and_pad"] else tokens) <= of_each


_MAP = of_dtypes("routing_map", 2, "routing_map is [T, E], bool or int8", _MAPS)
_PROBS = of_dtypes("probs", 2, "probs [T, E] floating")
_INDICES = of_dtypes("sorted_indices", 1, "sorted_indices is int32 with one dimension", (torch.int32,))
_SIZES = Rule(
    "there are tokens and experts, fewer than 16777215 of each",
    lambda a: all(0 < size <= _MOST for size in a["routing_map"].shape),
)

PERMUTE = Kernel(
    "npu::npu_moe_token_permute_with_routing_map",
    rules=(
        of_dtypes("tokens", 2, "tokens [T, h] floating"),
        _MAP,
        _PROBS,
        one_dtype("tokens", "probs"),
        Rule("tokens and probs have the tokens of routing_map, probs its experts",
             lambda a: a["tokens"].shape[0] == a["routing_map"].shape[0]
             and (a["probs"] is None or a["probs"].shape == a["routing_map"].shape)),
        _SIZES,
        Rule("num_out_tokens is 0 to T * E, with drop_and_pad at most T for each expert", _number_fits),
        Rule("num_out_tokens // T is below 512, unless drop_and_pad",
             lambda a: a["drop_and_pad"] or _number(a) // a["tokens"].shape[0] <= _MOST_COPIES),
        Rule("every row of routing_map selects num_out_tokens // T experts (not checked by the device), "
             "unless drop_and_pad",
             lambda a: a["drop_and_pad"] or _rows_alike(a, _number(a) // a["tokens"].shape[0]),
             of_values=True),
        Rule("fewer than 16777215 copies", lambda a: a["drop_and_pad"] or _number(a) <= _MOST),
    ),
    compute=permute,
    sources=(
        ops_transformer("moe/moe_token_permute_with_routing_map/op_host/op_api/"
                        "aclnn_moe_token_permute_with_routing_map.cpp"),
        ops_transformer("moe/moe_token_permute_with_routing_map/op_host/"
                        "moe_token_permute_with_routing_map_tiling.cpp"),
        ops_transformer("moe/moe_token_permute_with_routing_map/op_kernel/"
                        "moe_token_permute_with_routing_map.cpp"),
        op_plugin("op_plugin/ops/opapi/MoeTokenPermuteWithRoutingMapOpApi.cpp"),
    ),
    unwritten="everything, where rows are empty or none: the call succeeds and nothing is launched",
    differs=(
        "num_out_tokens is the number of tokens by default, as if each went to one expert",
        "with drop_and_pad an expert without enough tokens gets the first of the others",
    ),
    socs=_SOCS,
)  # fmt: skip
PERMUTE_GRAD = Kernel(
    "npu::npu_moe_token_permute_with_routing_map_grad",
    rules=(
        of_dtypes("permuted_token_out_grad", 2, "permuted_token_out_grad [rows, h] floating"),
        of_dtypes("probs_grad", 1, "probs_grad [rows] floating"),
        one_dtype("permuted_token_out_grad", "probs_grad"),
        _INDICES,
        _MAP,
        _SIZES,
        Rule("experts_num and tokens_num are those of routing_map",
             lambda a: tuple(a["routing_map"].shape) == (a["tokens_num"], a["experts_num"])),
        Rule("rows are those of sorted_indices",
             lambda a: a["permuted_token_out_grad"].shape[0] == a["sorted_indices"].numel() > 0),
    ),
    compute=permute_grad,
    sources=(
        ops_transformer("moe/moe_token_permute_with_routing_map_grad/op_host/op_api/"
                        "aclnn_moe_token_permute_with_routing_map_grad.cpp"),
        op_plugin("op_plugin/ops/opapi/MoeTokenPermuteWithRoutingMapGradOpApi.cpp"),
    ),
    socs=_SOCS,
)  # fmt: skip
UNPERMUTE = Kernel(
    "npu::_npu_moe_token_unpermute_with_routing_map",
    rules=(
        of_dtypes("permuted_tokens", 2, "permuted_tokens [rows, h] floating"),
        _INDICES,
        _PROBS,
        one_dtype("permuted_tokens", "probs"),
        _MAP,
        Rule("rows are those of sorted_indices, as wide as restore_shape",
             lambda a: a["permuted_tokens"].shape[0] == a["sorted_indices"].numel()
             and a["permuted_tokens"].shape[1] == a["restore_shape"][1]),
        Rule("probs come with routing_map, of its shape; at most 511 copies of a token, unless drop_and_pad",
             lambda a: a["probs"] is None or (
                 a["routing_map"] is not None and a["routing_map"].shape == a["probs"].shape
                 and (a["drop_and_pad"] or _copies_of_probs(a) <= _MOST_COPIES))),
        Rule("with probs, every row of routing_map selects as many experts, unless drop_and_pad",
             lambda a: a["probs"] is None or a["drop_and_pad"] or _rows_alike(a, _copies_of_probs(a)),
             of_values=True),
    ),
    compute=unpermute,
    sources=(
        ops_transformer("moe/moe_token_unpermute_with_routing_map/op_host/op_api/"
                        "aclnn_moe_token_unpermute_with_routing_map.cpp"),
        ops_transformer("moe/moe_token_unpermute_with_routing_map/op_host/"
                        "moe_token_unpermute_with_routing_map_tiling.cpp"),
        op_plugin("op_plugin/ops/opapi/MoeTokenUnpermuteWithRoutingMapKernelOpApi.cpp"),
    ),
    unwritten="indices for backward, unless drop_and_pad; everything, where there is no row",
    socs=_SOCS,
)  # fmt: skip
UNPERMUTE_GRAD = Kernel(
    "npu::npu_moe_token_unpermute_with_routing_map_grad",
    rules=(
        of_dtypes("unpermuted_tokens_grad", 2, "unpermuted_tokens_grad [T, h] floating"),
        of_dtypes("out_index", 1, "out_index is int32 with one dimension", (torch.int32,)),
        of_dtypes("permuted_token_id", 1, "permuted_token_id is int32 with one dimension", (torch.int32,)),
        Rule("out_index and permuted_token_id have one length, and rows",
             lambda a: a["out_index"].numel() == a["permuted_token_id"].numel() > 0),
        one_dtype("unpermuted_tokens_grad", "permuted_tokens", "probs"),
        Rule("probs come with permuted_tokens and routing_map",
             lambda a: a["probs"] is None
             or (a["permuted_tokens"] is not None and a["routing_map"] is not None
                 and a["routing_map"].dim() == 2)),
    ),
    compute=unpermute_grad,
    sources=(
        ops_transformer("moe/moe_token_unpermute_with_routing_map_grad/op_host/"
                        "moe_token_unpermute_with_routing_map_grad_tiling.cpp"),
        ops_transformer("moe/moe_token_unpermute_with_routing_map_grad/op_kernel/"
                        "moe_token_unpermute_with_routing_map_grad_prob_not_none_drop_pad_true.h"),
        op_plugin("op_plugin/config/derivatives.yaml"),
    ),
    socs=_SOCS,
)  # fmt: skip

KERNELS = (PERMUTE, PERMUTE_GRAD, UNPERMUTE, UNPERMUTE_GRAD)

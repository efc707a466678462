"""Floating-point operations of torch_npu's operators, by torch_npu's own formulas where it has them.

torch_npu registers formulas for its profiler, on the arguments of an operator. Taken are those that read
shapes and lists alone: one that reads a tensor's values would make the device wait, and has none in a dry
run. They count the half of the scores that a causal ``sparse_mode`` leaves; those of a band, which they
refuse, are counted here, and of other masks the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from math import prod
from typing import Any

_THEIRS = frozenset(
    {
        "npu_all_gather_base_mm",
        "npu_alltoallv_gmm",
        "npu_fusion_attention",
        "npu_gmm_alltoallv",
        "npu_quant_matmul_gelu",
        "npu_transpose_batchmatmul",
    }
)
_ATTENTION, _BACKWARD = "npu_fusion_attention", "_grad"
_COUNTED, _BAND = (0, 2, 3), 4
"""Values of ``sparse_mode``: those that torch_npu counts, and the band."""
_MODE, _AHEAD, _BEHIND = (
    (16, "sparse_mode", 0),
    (11, "next_tockens", 2**31 - 1),
    (10, "pre_tockens", 2**31 - 1),
)
"""Arguments of attention: position, name and default."""
_ROWS = {"BSH": 1, "BSND": 1, "SBH": 0, "BNSD": 2}
"""The dimension of positions, by layout."""


def npu_formula(name: str) -> Callable[..., float] | None:
    """Return the formula of an operator of the namespace ``npu``, of its arguments; None for none."""
    own = _OWN.get(name)
    if own is not None:
        return own
    if name in (_ATTENTION, _ATTENTION + _BACKWARD):
        theirs = _theirs(_ATTENTION)
        if theirs is None:
            return None
        of_attention = _attention if name == _ATTENTION else _attention_backward
        return lambda *args, **named: of_attention(theirs, args, named)
    return _theirs(name) if name in _THEIRS else None


def visible_scores(queries: int, keys: int, behind: int, ahead: int) -> int:
    """Return the scores in a band, whose last query stands at the last key.

    Args:
        queries: positions of queries.
        keys: positions of keys.
        behind: keys before a query's own position that it sees.
        ahead: keys after it that it sees.
    """
    offset = keys - queries
    hidden = _scores_beyond(queries, keys, offset + ahead) + _scores_beyond(keys, queries, behind - offset)
    return max(queries * keys - hidden, 0)


def _theirs(name: str) -> Callable[..., float] | None:
    try:
        # The registry is filled by the other module.
        import_module("torch_npu.profiler._flops_formulas")
        registry = import_module("torch_npu.profiler._flops_registry")
    except ImportError:
        # Builds before 2.13 have no formulas.
        return None
    found: Callable[..., float] | None = registry.get_flop_func(name)
    return found


def _attention(theirs: Callable[..., float], args: tuple[Any, ...], named: Any) -> float:
    """Return what torch_npu counts, also with masks for which it has no formula."""

    def given(argument: tuple[int, str, int]) -> int:
        position, name, default = argument
        return int(args[position] if len(args) > position else named.get(name, default))

    mode = given(_MODE)
    if mode in _COUNTED:
        return theirs(*args, **named)
    position, name, _ = _MODE
    args = args[:position] + (0,) * (len(args) > position) + args[position + 1 :]
    whole = theirs(*args, **({**named, name: 0} if len(args) <= position else named))
    rows = _ROWS.get(args[4].upper())
    if mode != _BAND or rows is None:
        return whole
    queries, keys = args[0].shape[rows], args[1].shape[rows]
    return whole * visible_scores(queries, keys, given(_BEHIND), given(_AHEAD)) / (queries * keys)


def _attention_backward(theirs: Callable[..., float], args: tuple[Any, ...], named: Any) -> float:
    """Return five products where forward has two; the fourth argument is the gradient of the result."""
    query, key, value, _, heads, layout, *rest = args
    return _attention(theirs, (query, key, value, heads, layout, *rest), named) * 5 / 2


def _scores_beyond(rows: int, columns: int, diagonal: int) -> int:
    """Return how many places of a matrix are above a diagonal: column − row > ``diagonal``."""

    def triangle(side: int) -> int:
        used = min(max(side, 0), rows)
        return used * side - used * (used - 1) // 2

    return triangle(columns - 1 - diagonal) - triangle(-1 - diagonal)


def _product(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return 2 * prod(left.shape) * int(right.shape[-1])


def _grouped(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Return the operations of grouped products, whose weights have one shape."""
    width = int(weights[0].shape[-1])
    return sum(2 * prod(one.shape) * width for one in rows)


_OWN: dict[str, Callable[..., float]] = {
    "npu_grouped_matmul": _grouped,
    "npu_mm_all_reduce_base": _product,
    "npu_mm_reduce_scatter_base": _product,
}

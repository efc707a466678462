"""Floating-point operations of torch_npu's operators, by torch_npu's own formulas where it has them.

torch_npu registers formulas for its profiler, on the arguments of an operator. Taken are those that read
shapes and lists alone: one that reads a tensor's values would make the device wait, and has none in a dry
run. They count the half of the scores that a causal ``sparse_mode`` leaves.
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
_BACKWARD = "_grad"


def npu_formula(name: str) -> Callable[..., float] | None:
    """Return the formula of an operator of the namespace ``npu``, of its arguments; None for none."""
    own = _OWN.get(name)
    if own is not None:
        return own
    if name == "npu_fusion_attention" + _BACKWARD:
        forward = _theirs("npu_fusion_attention")
        return None if forward is None else lambda *args, **named: _attention_backward(forward, args, named)
    return _theirs(name) if name in _THEIRS else None


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


def _attention_backward(forward: Callable[..., float], args: tuple[Any, ...], named: Any) -> float:
    """Return five products where forward has two; the fourth argument is the gradient of the result."""
    query, key, value, _, heads, layout, *rest = args
    return forward(query, key, value, heads, layout, *rest, **named) * 5 / 2


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

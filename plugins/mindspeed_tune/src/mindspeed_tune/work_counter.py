"""Operations of a rank: matrix products by shape, attention, and the bytes that everything else moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from mindspeed_core.platforms.equal_blocks import times
from mindspeed_tune.roofline import ATTENTION, BYTES, OPERATORS, matrix_key

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: 0, _aten.addmm: 1, _aten.bmm: 0, _aten.baddbmm: 1}
"""Matrix products, with the position of their first factor."""
_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_ROWS_FIRST = _aten._flash_attention_forward
_ROWS_FIRST_BACKWARD = _aten._flash_attention_backward
"""CUDA's own kernels, ``[b, s, n, d]``; torch's formulas take their rows for heads."""


class WorkCounter(TorchDispatchMode):
    """Counts the operators that run inside the context under the current key.

    Attributes:
        key: of what is counted now; empty counts nothing.
        work: operations by key.
    """

    def __init__(self) -> None:
        """Start with nothing counted."""
        super().__init__()
        self.key = ""
        self.work: dict[str, Counter[str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.key and func.namespace != "c10d" and not func.is_view and "empty" not in func.name():
            self._count(self.work.setdefault(self.key, Counter()), func, args, kwargs, result)
        return result

    def _count(
        self, counts: Counter[str], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        packet = func._overloadpacket
        first = _PRODUCTS.get(packet)
        if first is not None:
            a, b = args[first], args[first + 1]
            batch = prod(a.shape[:-2])
            counts[matrix_key(_dtype(a), a.shape[-2] * batch, b.shape[-1], a.shape[-1])] += times()
            return
        if packet in (_FLASH, _FLASH_BACKWARD):
            query, key, value = args[:3] if packet is _FLASH else args[1:4]
            work = _flash(query.shape, key.shape, value.shape, packet is _FLASH)
            counts[f"{ATTENTION} {_dtype(query)}"] += times() * work
            return
        if packet in (_ROWS_FIRST, _ROWS_FIRST_BACKWARD):
            forward = packet is _ROWS_FIRST
            tensors = args[:3] if forward else args[1:4]
            # Packed sequences, [t, n, d], are counted as if each saw all others.
            q, k, v = ((*one.shape[:-3], one.shape[-2], one.shape[-3], one.shape[-1]) for one in tensors)
            work = _flash(q, k, v, forward)
            counts[f"{ATTENTION} {_dtype(tensors[0])}"] += times() * work
            return
        formula = flop_registry.get(packet)
        if formula is not None:
            given = next(_tensors(args), None)
            dtype = _dtype(given) if given is not None else "float32"
            counts[f"{ATTENTION} {dtype}"] += times() * int(formula(*args, **kwargs, out_val=result))
            return
        counts[OPERATORS] += times()
        moved = sum(t.numel() * t.element_size() for t in _tensors((args, kwargs, result)))
        counts[BYTES] += times() * moved


def _flash(query: Sequence[int], key: Sequence[int], value: Sequence[int], forward: bool) -> int:
    """Return the operations of an attention kernel on these shapes: two products forward, five backward."""
    *batch, queries, width = query
    keys, value_width = key[-2], value[-1]
    one, other = 2 * prod(batch) * queries * keys * width, 2 * prod(batch) * queries * keys * value_width
    return one + other if forward else 3 * one + 2 * other


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, torch.Tensor))

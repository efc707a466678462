"""Operations of a rank, counted: matrix products by shape, attention, and the bytes that all else moves.

The one counter of floating-point operations: of plans, of the work behind a collective, and of a training
step. Formulas are torch's (``torch.utils.flop_counter``), corrected where it counts nothing (attention on
CPU) or takes rows for heads (CUDA's own attention kernels), and torch_npu's for operators of NPUs. Attention
is counted over the whole score matrix, whatever a mask hides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry

from mindspeed_megatron.equal_blocks import times
from mindspeed_megatron.instruments.memory import DEVICE, device_of, tensors_in
from mindspeed_megatron.instruments.npu_operations import npu_formula
from mindspeed_megatron.instruments.observer import Observer
from mindspeed_megatron.instruments.operations import ATTENTION, BYTES, OPERATORS, matrix_key

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: 0, _aten.addmm: 1, _aten.bmm: 0, _aten.baddbmm: 1}
"""Matrix products, with the position of their first factor."""
_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_ROWS_FIRST = _aten._flash_attention_forward
_ROWS_FIRST_BACKWARD = _aten._flash_attention_backward
"""CUDA's own kernels, ``[b, s, n, d]``; torch's formulas take their rows for heads."""


class WorkCounter(Observer):
    """Counts the operators that run inside the context under the current key.

    Those inside of compiled functions are not seen: nothing of elementwise ones enters floating-point
    operations, and compiled attention is told by `count_compiled_attention`.

    Attributes:
        key: of what is counted now; empty counts nothing.
        work: operations by key.
    """

    def __init__(self, key_of: Callable[[], str] | None = None) -> None:
        """Start with nothing counted.

        Args:
            key_of: called for every operator that computes; the key in place of the attribute.
        """
        super().__init__()
        self.key = ""
        self.work: dict[str, Counter[str]] = {}
        self._key_of = key_of

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count it."""
        if func is DEVICE:
            return device_of(args[0])
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.ran(func, args, kwargs, result)
        return result

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count an operator that has run under the current key."""
        if (self.key or self._key_of) and computes(func):
            key = self.key if self._key_of is None else self._key_of()
            add_work(self.work.setdefault(key, Counter()), func, args, kwargs, result)

    def add_attention(self, dtype: str, flops: int) -> None:
        """Count attention that ran out of sight under the current key."""
        key = self.key if self._key_of is None else self._key_of()
        if key:
            self.work.setdefault(key, Counter())[f"{ATTENTION} {dtype}"] += times() * flops


def count_compiled_attention(
    context: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Count attention of a compiled function, and its backward when that begins, where somebody counts.

    Args:
        context: ``[b, n, sq, dv]``, what it returned.
        query: ``[b, n, sq, d]``.
        key: ``[b, groups, sk, d]``.
        value: ``[b, groups, sk, dv]``.
    """
    counters = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, WorkCounter)]
    if not counters:
        return
    dtype, shapes = _dtype(query), (query.shape, key.shape, value.shape)

    def add(*, forward: bool) -> None:
        for counter in counters:
            counter.add_attention(dtype, _flash(*shapes, forward))

    add(forward=True)
    if context.requires_grad:
        context.register_hook(lambda gradient: add(forward=False))


@lru_cache(maxsize=4096)
def computes(func: Any) -> bool:
    """Return whether an operator computes a tensor: no view, allocation or communication."""
    return func.namespace != "c10d" and not func.is_view and "empty" not in func.name()


def add_work(
    counts: Counter[str], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> None:
    """Add what an operator computed to the counts of its kind."""
    shape = _product(func, args)
    if shape is not None:
        counts[matrix_key(_dtype(args[_PRODUCTS[func._overloadpacket]]), *shape)] += times()
        return
    work = _formula(func, args, kwargs, result)
    if work is not None:
        given = next(tensors_in(args), None)
        counts[f"{ATTENTION} {'float32' if given is None else _dtype(given)}"] += times() * work
        return
    counts[OPERATORS] += times()
    moved = sum(t.numel() * t.element_size() for t in tensors_in((args, kwargs, result)))
    counts[BYTES] += times() * moved


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the floating-point operations of an operator that has run; 0 for one without a formula."""
    shape = _product(func, args)
    work = 2 * prod(shape) if shape is not None else _formula(func, args, kwargs, result)
    return times() * (work or 0)


def _product(func: Any, args: tuple[Any, ...]) -> tuple[int, int, int] | None:
    """Return rows, columns and inner length of a matrix product, batches being rows; None for another one."""
    first = _PRODUCTS.get(func._overloadpacket)
    if first is None:
        return None
    a, b = args[first], args[first + 1]
    return a.shape[-2] * prod(a.shape[:-2]), b.shape[-1], a.shape[-1]


def _formula(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int | None:
    packet = func._overloadpacket
    if packet in (_FLASH, _FLASH_BACKWARD):
        query, key, value = args[:3] if packet is _FLASH else args[1:4]
        return _flash(query.shape, key.shape, value.shape, packet is _FLASH)
    if packet in (_ROWS_FIRST, _ROWS_FIRST_BACKWARD):
        forward = packet is _ROWS_FIRST
        tensors = args[:3] if forward else args[1:4]
        # Packed sequences, [t, n, d], are counted as if each saw all others.
        q, k, v = ((*one.shape[:-3], one.shape[-2], one.shape[-3], one.shape[-1]) for one in tensors)
        return _flash(q, k, v, forward)
    formula = flop_registry.get(packet)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    formula = _of_npu(func.namespace, packet.__name__)
    return None if formula is None else int(formula(*args, **kwargs))


@lru_cache(maxsize=4096)
def _of_npu(namespace: str, name: str) -> Callable[..., float] | None:
    return npu_formula(name) if namespace == "npu" else None


def _flash(query: Sequence[int], key: Sequence[int], value: Sequence[int], forward: bool) -> int:
    """Return the operations of an attention kernel on these shapes: two products forward, five backward."""
    *batch, queries, width = query
    keys, value_width = key[-2], value[-1]
    one, other = 2 * prod(batch) * queries * keys * width, 2 * prod(batch) * queries * keys * value_width
    return one + other if forward else 3 * one + 2 * other


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

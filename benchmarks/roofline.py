"""Measure the best this machine can do, and how near to it each operation of a computation comes.

The best of a machine is measured: products per second by dtype, bytes copied per second from memory and
inside of the cache. A computation is then taken apart into the operations that torch runs for it, each with
its time, the bytes it reads and writes, and its products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclass
class Spent:
    """Time and size of one kind of operation in a computation."""

    times: int = 0
    seconds: float = 0.0
    bytes: int = 0
    flop: float = 0.0


@dataclass
class Best:
    """Best figures of the machine on one thread.

    Attributes:
        flop: products and sums per second of a large product, by dtype.
        memory: bytes per second of a copy that no cache holds, reads and writes.
        cache: the same of a copy that the cache holds.
    """

    flop: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0
    cache: float = 0.0


def seconds(function: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def measured_best() -> Best:
    """Measure the machine."""
    best = Best()
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
        best.flop[name_of(dtype)] = 2 * 1024**3 / min(seconds(lambda x=a, y=b: x @ y) for _ in range(60))
    large = torch.randn(1 << 25)
    target = torch.empty_like(large)
    best.memory = 2 * large.nbytes / min(seconds(lambda: target.copy_(large)) for _ in range(12))
    small, there, turns = large[: 1 << 17], target[: 1 << 17], 256

    def again() -> None:
        for _ in range(turns):
            there.copy_(small)

    best.cache = 2 * small.nbytes * turns / min(seconds(again) for _ in range(12))
    return best


def name_of(dtype: torch.dtype) -> str:
    """``float32`` instead of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


class TakenApart(TorchDispatchMode):
    """Times every operation that moves or computes something; views cost nothing and are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.spent: dict[str, Spent] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and note what it took."""
        given = kwargs or {}
        begin = time.process_time()
        result = func(*args, **given)
        took = time.process_time() - begin
        if func.is_view:
            return result
        entry = self.spent.setdefault(func.overloadpacket.__name__, Spent())
        entry.times, entry.seconds = entry.times + 1, entry.seconds + took
        entry.bytes += _moved((args, given)) + _moved(result)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            entry.flop += count(*args, **given, out_val=result)
        entry.flop += _of_attention(func.overloadpacket.__name__, args)
        return result


def _of_attention(name: str, args: Any) -> float:
    """Products of torch's attention on CPU, which its own counter leaves out."""
    if not name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        return 0.0
    backward = name.endswith("backward")
    query, key = args[1:3] if backward else args[:2]
    # Arguments with their default values are left out.
    at = 7 if backward else 4
    causal = len(args) > at and args[at]
    one_product = 2.0 * query.numel() * key.shape[2] / (2 if causal else 1)
    return (5 if backward else 2) * one_product


def _moved(values: Any) -> int:
    """Bytes of tensors, expanded ones counted once."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)


def taken_apart(function: Callable[[], object], rounds: int = 3) -> dict[str, Spent]:
    """Return the operations of a call in its quickest round, longest first."""
    found: list[dict[str, Spent]] = []
    for _ in range(rounds):
        with TakenApart() as mode:
            function()
        found.append(mode.spent)
    quickest = min(found, key=lambda spent: sum(item.seconds for item in spent.values()))
    return dict(sorted(quickest.items(), key=lambda item: -item[1].seconds))

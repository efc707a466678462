"""Counting communication: calls and bytes per operation and process group.

The functions of ``torch.distributed`` are wrapped where they are defined and wherever megatron-core and
plugins hold them by name; a dispatcher-level mode would miss calls from autograd's threads and coalesced
ones.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_core.feature import Patch
from mindspeed_core.runtime.patches import PatchLedger


@dataclass(frozen=True)
class Call:
    """One communication call of this rank.

    Attributes:
        operation: the function's name, ``all_reduce``.
        group: the process group's description (``TENSOR_MODEL_PARALLEL_GROUP``, ``cp.ring``), or its ranks.
        ranks: global ranks of the group.
        input_bytes: bytes of this rank's input; 0 for a receive.
        sent_bytes: bytes this rank puts on the wire with a ring or pairwise algorithm.
        asynchronous: called with ``async_op=True`` or immediate by nature.
    """

    operation: str
    group: str
    ranks: tuple[int, ...]
    input_bytes: int
    sent_bytes: float
    asynchronous: bool = False


@dataclass(frozen=True)
class Total:
    """The calls of one operation in one group, added up."""

    calls: int
    input_bytes: int
    sent_bytes: float


@dataclass
class CommunicationLog:
    """What a rank communicated, in order."""

    calls: list[Call] = field(default_factory=list)
    _paused: int = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record inside the context: what the measurement itself communicates."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def select(self, operation: str = "", group: str = "") -> list[Call]:
        """Return the calls of one operation and group; empty means any."""
        return [
            call
            for call in self.calls
            if (not operation or call.operation == operation) and (not group or call.group == group)
        ]

    def count(self, operation: str = "", group: str = "") -> int:
        """Count the calls."""
        return len(self.select(operation, group))

    def input_bytes(self, operation: str = "", group: str = "") -> int:
        """Return the bytes of this rank's inputs."""
        return sum(call.input_bytes for call in self.select(operation, group))

    def sent_bytes(self, operation: str = "", group: str = "") -> float:
        """Return the bytes this rank sends."""
        return sum(call.sent_bytes for call in self.select(operation, group))

    def table(self) -> dict[tuple[str, str], Total]:
        """Return totals by operation and group."""
        keys = sorted({(call.operation, call.group) for call in self.calls})
        return {key: Total(self.count(*key), self.input_bytes(*key), self.sent_bytes(*key)) for key in keys}


@contextmanager
def count_communication() -> Iterator[CommunicationLog]:
    """Record every communication of this process inside the context.

    A call inside another recorded call is not counted again. Collectives of compiled graphs
    (``torch.distributed._functional_collectives``) do not pass through these functions and are not seen.
    """
    log = CommunicationLog()
    depth = threading.local()
    ledger = PatchLedger()
    ledger.apply(
        [
            Patch(
                target=f"torch.distributed.distributed_c10d:{name}",
                new=functools.partial(_counting, name, measure, log, depth),
                reason="counts calls and bytes",
                kind="wrap",
                owner="communication log",
                required=False,
            )
            for name, measure in _MEASURES.items()
        ]
    )
    try:
        yield log
    finally:
        ledger.revert()


def _counting(
    name: str, measure: Callable[..., _Sizes], log: CommunicationLog, depth: Any, original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if log._paused or getattr(depth, "inside", False):
            return original(*args, **kwargs)
        sizes = measure(*args, **kwargs)
        group = kwargs.get("group", sizes.group)
        ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        log.calls.append(
            Call(
                name,
                _label(group, ranks),
                ranks,
                sizes.input_bytes,
                sizes.sent(len(ranks), ranks.index(dist.get_rank()) if dist.get_rank() in ranks else -1),
                bool(kwargs.get("async_op", False)) or name in ("isend", "irecv"),
            )
        )
        depth.inside = True
        try:
            return original(*args, **kwargs)
        finally:
            depth.inside = False

    return counted


def _label(group: Any, ranks: Sequence[int]) -> str:
    described = getattr(group, "group_desc", "") if group is not None else "default_pg"
    if described in ("", "undefined"):
        return "ranks " + ",".join(str(rank) for rank in ranks)
    return str(described)


@dataclass(frozen=True)
class _Sizes:
    """Bytes of an input, the group as a positional argument, and the wire formula over (world, own rank)."""

    input_bytes: int
    sent: Callable[[int, int], float]
    group: Any = None


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sum(tensors: Iterable[torch.Tensor] | None) -> int:
    return sum(_bytes(tensor) for tensor in tensors or ())


def _all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> _Sizes:
    n = _bytes(tensor)
    return _Sizes(n, lambda p, _: 2 * (p - 1) / p * n, group)


def _all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> _Sizes:
    n = _bytes(input_tensor)
    return _Sizes(n, lambda p, _: (p - 1) * n, group)


def _all_gather(tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> _Sizes:
    n = _bytes(tensor)
    return _Sizes(n, lambda p, _: (p - 1) * n, group)


def _reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> _Sizes:
    n = _bytes(input)
    return _Sizes(n, lambda p, _: (p - 1) / p * n, group)


def _reduce_scatter(
    output: torch.Tensor, input_list: Any, op: Any = None, group: Any = None, async_op: bool = False
) -> _Sizes:
    n = _sum(input_list)
    return _Sizes(n, lambda p, _: (p - 1) / p * n, group)


def _all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> _Sizes:
    n = _bytes(input)
    if input_split_sizes is None or len(input_split_sizes) == 0:
        return _Sizes(n, lambda p, _: (p - 1) / p * n, group)
    row = n // input.shape[0] if input.shape[0] else 0
    splits = [int(size) for size in input_split_sizes]
    return _Sizes(n, lambda _, me: row * (sum(splits) - splits[me]), group)


def _all_to_all(
    output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> _Sizes:
    sizes = [_bytes(tensor) for tensor in input_tensor_list]
    return _Sizes(sum(sizes), lambda _, me: sum(sizes) - sizes[me], group)


def _broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> _Sizes:
    n = _bytes(tensor)
    # A pipelined ring: every rank but the last one forwards the tensor once.
    return _Sizes(n, lambda p, _: (p - 1) / p * n, group)


def _reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> _Sizes:
    n = _bytes(tensor)
    return _Sizes(n, lambda p, _: (p - 1) / p * n, group)


def _gather(
    tensor: torch.Tensor,
    gather_list: Any = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> _Sizes:
    n = _bytes(tensor)
    return _Sizes(n, lambda p, _: 0 if gather_list else n, group)


def _scatter(
    tensor: torch.Tensor,
    scatter_list: Any = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> _Sizes:
    n = _sum(scatter_list)
    return _Sizes(n, lambda p, _: (p - 1) / p * n, group)


def _send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> _Sizes:
    n = _bytes(tensor)
    return _Sizes(n, lambda *_: n, group)


def _recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> _Sizes:
    return _Sizes(0, lambda *_: 0, group)


def _barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> _Sizes:
    return _Sizes(0, lambda *_: 0, group)


_MEASURES: dict[str, Callable[..., _Sizes]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "isend": _send,
    "recv": _recv,
    "irecv": _recv,
    "barrier": _barrier,
}
"""Every wrapped function with the reading of its arguments; parameter names are torch's."""

COLLECTIVES = frozenset(_MEASURES) - {"send", "isend", "recv", "irecv", "barrier"}
"""Operations in which a whole group takes part and data moves."""

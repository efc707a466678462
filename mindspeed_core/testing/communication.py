"""Communication of a rank: calls and bytes per operation and process group.

The functions of ``torch.distributed`` are wrapped where they are defined and wherever megatron-core and
plugins hold them by name; a dispatcher-level mode would miss calls from autograd's threads and coalesced
ones.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """The communication calls of a rank, in order."""

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
                new=functools.partial(_counting, name, log, depth),
                reason="counts calls and bytes",
                kind="wrap",
                owner="communication log",
                required=False,
            )
            for name in _MEASURES
        ]
    )
    try:
        yield log
    finally:
        ledger.revert()


def _counting(
    name: str, log: CommunicationLog, depth: Any, original: Callable[..., Any]
) -> Callable[..., Any]:
    signature = inspect.signature(original)
    argument, sent = _MEASURES[name]

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if log._paused or getattr(depth, "inside", False):
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        group = given.get("group")
        ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        me = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else -1
        n = sum(_sizes(given.get(argument)))
        asynchronous = bool(given.get("async_op", False)) or name in ("isend", "irecv")
        log.calls.append(
            Call(name, _label(group, ranks), ranks, n, sent(n, len(ranks), me, given), asynchronous)
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


def _sizes(tensors: Any) -> list[int]:
    """Return the bytes of each tensor of an input: one, several, or None."""
    listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors or []
    return [tensor.numel() * tensor.element_size() for tensor in listed]


def _sent_all_to_all(n: int, p: int, me: int, given: Mapping[str, Any]) -> float:
    return n - _sizes(given["input_tensor_list"])[me]


def _sent_all_to_all_single(n: int, p: int, me: int, given: Mapping[str, Any]) -> float:
    splits = given.get("input_split_sizes")
    if splits is None or len(splits) == 0:
        return _others_share(n, p, me, given)
    length = given["input"].shape[0]
    row = n // length if length else 0
    return row * (sum(map(int, splits)) - int(splits[me]))


def _others_share(n: int, p: int, me: int, given: Mapping[str, Any]) -> float:
    return (p - 1) / p * n


def _whole(n: int, p: int, me: int, given: Mapping[str, Any]) -> float:
    return n


def _to_every_other(n: int, p: int, me: int, given: Mapping[str, Any]) -> float:
    return (p - 1) * n


_MEASURES: dict[str, tuple[str, Callable[[int, int, int, Mapping[str, Any]], float]]] = {
    "all_reduce": ("tensor", lambda n, p, *_: 2 * (p - 1) / p * n),
    "all_gather": ("tensor", _to_every_other),
    "all_gather_into_tensor": ("input_tensor", _to_every_other),
    "reduce_scatter": ("input_list", _others_share),
    "reduce_scatter_tensor": ("input", _others_share),
    "all_to_all": ("input_tensor_list", _sent_all_to_all),
    "all_to_all_single": ("input", _sent_all_to_all_single),
    # A pipelined ring: every rank but the last one forwards the tensor once.
    "broadcast": ("tensor", _others_share),
    "reduce": ("tensor", _others_share),
    "gather": ("tensor", lambda n, p, me, given: 0 if given.get("gather_list") else n),
    "scatter": ("scatter_list", _others_share),
    "send": ("tensor", _whole),
    "isend": ("tensor", _whole),
    "recv": ("", _whole),
    "irecv": ("", _whole),
    "barrier": ("", _whole),
}
"""Each counted function: its input argument, and the bytes sent by input bytes, group size, own position and
arguments."""

COLLECTIVES = frozenset(_MEASURES) - {"send", "isend", "recv", "irecv", "barrier"}
"""Operations in which a whole group takes part and data moves."""

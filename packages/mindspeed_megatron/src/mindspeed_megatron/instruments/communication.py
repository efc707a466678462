"""Communication of a rank: calls and bytes per operation and process group.

The functions of ``torch.distributed`` are wrapped where they are defined and wherever megatron-core and
plugins hold them by name; a dispatcher-level mode would miss calls from autograd's threads and coalesced
ones. A wait is seen on the handle that the call returned, or on the one that a coalesced batch shares.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_core.feature import Patch
from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_megatron.backend_contracts.contract import REDUCTIONS, BackendContract
from mindspeed_megatron.backend_contracts.rendezvous import MESSAGES
from mindspeed_megatron.backend_contracts.tensor_facts import CollectiveCall, TensorFacts, is_gloo_group
from mindspeed_megatron.instruments.code_places import running_code
from mindspeed_megatron.instruments.work_counter import computes, flops_of


@dataclass(frozen=True)
class Progress:
    """A point in this rank's execution, or the work between two of them.

    Attributes:
        seconds: host time; on a device, of launching rather than of execution.
        operators: operators that computed a tensor: no views, allocations or communication; 0 unless
            computation is counted.
        flops: floating-point operations of the matrix products, convolutions and attentions among them, as
            `mindspeed_megatron.instruments.work_counter` counts.
    """

    seconds: float
    operators: int = 0
    flops: int = 0


@dataclass
class Call:
    """One communication call of this rank.

    Attributes:
        operation: the function's name, ``all_reduce``.
        group: the process group's description (``TENSOR_MODEL_PARALLEL_GROUP``, ``cp.ring``), or its ranks.
        ranks: global ranks of the group.
        input_bytes: bytes of this rank's input; 0 for a receive.
        sent_bytes: bytes this rank puts on the wire with a ring or pairwise algorithm.
        asynchronous: called with ``async_op=True`` or immediate by nature.
        launched: where this rank was when it made the call.
        dtype: of the first tensor, ``bfloat16``; empty for a barrier.
        tensor_bytes: bytes of the tensors that are sent or received; as ``input_bytes``, but for a receive.
        peer: global rank of the other side of a send or receive, or of the root; None where all are alike.
        group_name: the name by which ``torch.distributed`` knows the group.
        waited: where it first waited for the result; of a synchronous call where it returned, None while
            nobody has waited.
        launch_event: place of the call among all launches and waits of this rank.
        wait_event: place of the first wait among them; None while nobody has waited.
        batch: number of the coalesced batch that holds the call; None outside of one.
        creates: it is the first of its communicator, which the backend makes now: of the group, or of the
            pair of ranks for messages outside of a batch.
    """

    operation: str
    group: str
    ranks: tuple[int, ...]
    input_bytes: int
    sent_bytes: float
    asynchronous: bool
    launched: Progress
    dtype: str = ""
    tensor_bytes: int = 0
    peer: int | None = None
    group_name: str = ""
    waited: Progress | None = None
    launch_event: int = 0
    wait_event: int | None = None
    batch: int | None = None
    creates: bool = False

    @property
    def communicator(self) -> tuple[str, int | None]:
        """Return what tells this rank's communicators apart: the group, and the peer of a single message."""
        alone = self.operation in MESSAGES and self.batch is None
        return self.group_name, self.peer if alone else None

    def __str__(self) -> str:
        """Return the call as other ranks of the group must make it: group, operation, bytes, dtype, peer."""
        peer = "" if self.peer is None else f" with rank {self.peer}"
        return f"{self.group}: {self.operation} of {self.tensor_bytes:,} B {self.dtype}{peer}"

    @property
    def whole_bytes(self) -> int:
        """Return the bytes of the tensor that all ranks have together, a gathered result for instance."""
        return self.input_bytes * (len(self.ranks) if self.operation.startswith("all_gather") else 1)

    @property
    def meanwhile(self) -> Progress | None:
        """Return the work of this rank between launch and wait; None while nobody has waited."""
        if self.waited is None:
            return None
        a, b = self.launched, self.waited
        return Progress(b.seconds - a.seconds, b.operators - a.operators, b.flops - a.flops)


class CommunicationListener(Protocol):
    """Hears of the calls of this rank and of its waits: in a synchronous call, or for an asynchronous one."""

    def call_made(self, call: Call) -> None:
        """Hear that the rank calls."""

    def wait_started(self, call: Call) -> None:
        """Hear that the rank begins to wait; on a device its stream does."""

    def wait_stopped(self, call: Call) -> None:
        """Hear that the result is there, or that the stream goes on when it is."""


@dataclass(frozen=True)
class Total:
    """The calls of one operation in one group, added up."""

    calls: int
    input_bytes: int
    sent_bytes: float


@dataclass(frozen=True)
class GroupRecord:
    """A process group that was made, this rank being a member or not.

    Attributes:
        description: as in `Call`.
        ranks: global ranks of its members.
        name: the name by which ``torch.distributed`` knows it; empty where this rank is no member.
    """

    description: str
    ranks: tuple[int, ...]
    name: str


@dataclass
class CommunicationLog:
    """The communication calls of a rank, in order.

    Attributes:
        groups: the process groups made meanwhile, in order.
    """

    calls: list[Call] = field(default_factory=list)
    groups: list[GroupRecord] = field(default_factory=list)
    _paused: int = 0

    def largest_temporary(self, temporaries: Mapping[str, float]) -> tuple[float, Call | None]:
        """Return the most bytes that a backend takes for itself during a call, and that call.

        Args:
            temporaries: `mindspeed_core.platforms.platform.Platform.backend_temporaries`.
        """
        sizes = [
            (temporaries[call.operation] * call.whole_bytes, number)
            for number, call in enumerate(self.calls)
            if call.operation in temporaries
        ]
        if not sizes:
            return 0.0, None
        most = max(size for size, _ in sizes)
        return most, next(self.calls[number] for size, number in sizes if size == most)

    def communicators(self) -> tuple[int, int]:
        """Return how many communicators a device backend makes for these calls: of groups, and of pairs.

        Messages outside of a batch have one for each pair of ranks; groups of one rank communicate nothing.
        """
        made = {
            call.communicator for call in self.calls if len(call.ranks) > 1 and not is_gloo_group(call.group)
        }
        pairs = sum(peer is not None for _, peer in made)
        return len(made) - pairs, pairs

    def made_late(self) -> list[tuple[Call, Call]]:
        """Return calls that make a group's communicator while a collective of this rank is under way.

        All ranks of the group meet there, on the host, and nothing of theirs goes on meanwhile: what was to
        be hidden behind the collective waits for it. Pairs of ranks, which pipeline stages make one by one,
        do not count.

        Returns:
            Each such call, with the collective that was under way.
        """
        under_way: list[Call] = []
        found = []
        for call in self.calls:
            if len(call.ranks) == 1 or is_gloo_group(call.group) or call.operation in MESSAGES:
                continue
            at = call.launch_event
            under_way = [one for one in under_way if one.wait_event is None or one.wait_event > at]
            if call.creates and under_way:
                found.append((call, under_way[0]))
            if call.asynchronous:
                under_way.append(call)
        return found

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
def count_communication(
    computation: bool = False,
    objects: bool = False,
    contracts: Sequence[BackendContract] = (),
    listener: CommunicationListener | None = None,
) -> Iterator[CommunicationLog]:
    """Record every communication of this process inside the context.

    A call inside another recorded call is not counted again. Collectives of compiled graphs
    (``torch.distributed._functional_collectives``) do not pass through these functions and are not seen.

    Args:
        computation: also count operators and floating-point operations, which tells what lay between a launch
            and its wait; costs some microseconds per operator.
        objects: record a collective of Python objects as one call without bytes, rather than the calls that
            carry the pickled objects.
        contracts: refuse what these backends refuse, before it is called, in every group that is not one of
            gloo by its description.
        listener: hears of every call and wait.

    Raises:
        BackendRefusal: in the call that breaks a rule.
    """
    recorder = _Recorder(CommunicationLog(), _Computation() if computation else None, contracts, listener)
    wrappers: dict[str, Callable[..., Any]] = {
        name: functools.partial(recorder.counting, _SAME_OPERATION.get(name, name))
        for name in (*_MEASURES, *_SAME_OPERATION, *(_OBJECTS if objects else ()))
    }
    wrappers |= {
        "_coalescing_manager": recorder.coalescing,
        "batch_isend_irecv": recorder.batching,
        "new_group": recorder.grouping,
    }
    targets = {f"torch.distributed.distributed_c10d:{name}": new for name, new in wrappers.items()}
    targets |= dict.fromkeys(_own_waits(), recorder.waiting)
    ledger = PatchLedger()
    ledger.apply(
        [
            Patch(
                target=target,
                new=wrapper,
                reason="counts calls and bytes",
                kind="wrap",
                owner="communication log",
                required=False,
            )
            for target, wrapper in targets.items()
        ]
    )
    with ExitStack() as stack:
        stack.callback(ledger.revert)
        if recorder.computation is not None:
            stack.enter_context(recorder.computation)
        yield recorder.log


def _own_waits() -> Iterator[str]:
    """Yield ``wait`` of ``torch.distributed.Work`` and of each class of torch that has one of its own.

    The work of a world without peers is such a class.
    """
    classes = [dist.Work]
    for one in classes:
        classes += one.__subclasses__()
        if "wait" in vars(one) and one.__module__.startswith("torch."):
            yield f"{one.__module__}:{one.__qualname__}.wait"


class _Computation(TorchDispatchMode):
    """Counts operators that compute, and their floating-point operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if computes(func):
            self.operators += 1
            self.flops += flops_of(func, args, kwargs, result)
        return result


class _Recorder:
    """The wrappers of one log."""

    def __init__(
        self,
        log: CommunicationLog,
        computation: _Computation | None,
        contracts: Sequence[BackendContract] = (),
        listener: CommunicationListener | None = None,
    ) -> None:
        self.log = log
        self.computation = computation
        self._contracts = tuple(contracts)
        self._listener = listener
        self._events = self._batches = 0
        self._depth = threading.local()
        self._groups: weakref.WeakKeyDictionary[Any, tuple[str, tuple[int, ...], int, str]]
        self._groups = weakref.WeakKeyDictionary()
        self._unfinished: weakref.WeakKeyDictionary[Any, list[Call]] = weakref.WeakKeyDictionary()
        self._communicators: set[tuple[str, int | None]] = set()

    def now(self) -> Progress:
        counted = self.computation
        if counted is None:
            return Progress(time.perf_counter())
        return Progress(time.perf_counter(), counted.operators, counted.flops)

    def counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)
        argument, sent = _MEASURES.get(name, ("", _whole))

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.log._paused or getattr(self._depth, "inside", False):
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            label, ranks, me, group_name = self._facts(given.get("group"))
            tensors = given.get(argument or "tensor")
            of_tensors = sum(_sizes(tensors))
            n = of_tensors if argument else 0
            asynchronous = bool(given.get("async_op", False)) or name in ("isend", "irecv")
            if self._contracts:
                self._check(name, label, ranks, given)
            call = Call(
                name,
                label,
                ranks,
                n,
                sent(n, len(ranks), me, given),
                asynchronous,
                self.now(),
                dtype=_dtype(tensors),
                tensor_bytes=of_tensors,
                peer=_peer(given, ranks),
                group_name=group_name,
                launch_event=self._event(),
            )
            self.log.calls.append(call)
            if self._listener is not None:
                self._listener.call_made(call)
            if not (name in MESSAGES and getattr(self._depth, "batching", False)):
                self._create(call)
            self._depth.inside = True
            try:
                with nullcontext() if asynchronous else self._waiting_for(call):
                    result = original(*args, **kwargs)
            finally:
                self._depth.inside = False
            if not asynchronous:
                call.waited, call.wait_event = self.now(), self._event()
            elif isinstance(work := getattr(result, "work", result), dist.Work):
                # A dry run's transfers hold the work that is waited for.
                self._unfinished[work] = [call]
            return result

        return counted

    @contextmanager
    def _waiting_for(self, call: Call) -> Iterator[None]:
        if self._listener is None:
            yield
            return
        self._listener.wait_started(call)
        try:
            yield
        finally:
            self._listener.wait_stopped(call)

    def _event(self) -> int:
        self._events += 1
        return self._events

    def _create(self, *calls: Call) -> None:
        """Note which call is the first of its communicator."""
        for call in calls:
            apart = len(call.ranks) == 1 or is_gloo_group(call.group)
            if not apart and call.communicator not in self._communicators:
                self._communicators.add(call.communicator)
                call.creates = True

    @contextmanager
    def _batch_under_way(self) -> Iterator[None]:
        """Leave communicators to the whole batch: only behind it is known that its messages are of one."""
        before = getattr(self._depth, "batching", False)
        self._depth.batching = True
        try:
            yield
        finally:
            self._depth.batching = before

    def _check(self, name: str, label: str, ranks: Sequence[int], given: Mapping[str, Any]) -> None:
        """Hold a call against the contracts of the backends that would serve it."""
        if is_gloo_group(label) or len(ranks) == 1:
            return
        call = CollectiveCall(
            name,
            label,
            len(ranks),
            tuple(_tensor_facts(given)),
            _reduction(given) if "op" in given or name in REDUCTIONS else "",
            # Given as a list, an array or a tensor; an empty one means equal parts.
            {key: tuple(map(int, given[key])) for key in _SPLITS if given.get(key) is not None},
            from_any=name in ("recv", "irecv")
            and given.get("src") is None
            and given.get("group_src") is None,
        )
        for contract in self._contracts:
            broken = contract.broken_rule(call)
            if broken is not None:
                place = next(iter(running_code(_BETWEEN, 1)), "")
                contract.check(call, str(place))

    def _facts(self, group: Any) -> tuple[str, tuple[int, ...], int, str]:
        """Return label, ranks, own position and name of a group; large groups take long to list."""
        given: Any = group if group is not None else dist.group.WORLD
        facts = self._groups.get(given)
        if facts is None:
            ranks = tuple(dist.get_process_group_ranks(given))
            me = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else -1
            facts = self._groups[given] = (_label(group, ranks), ranks, me, str(given.group_name))
        return facts

    def grouping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def new_group(*args: Any, **kwargs: Any) -> Any:
            group = original(*args, **kwargs)
            if not self.log._paused:
                given = kwargs.get("ranks", args[0] if args else None)
                ranks = tuple(range(dist.get_world_size()) if given is None else sorted(given))
                member = group is not None and group != dist.GroupMember.NON_GROUP_MEMBER
                described = kwargs.get("group_desc") or (args[5] if len(args) > 5 else None) or ""
                label = _described(str(described), ranks)
                self.log.groups.append(GroupRecord(label, ranks, str(group.group_name) if member else ""))
            return group

        return new_group

    def coalescing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        @contextmanager
        def coalesced(*args: Any, **kwargs: Any) -> Iterator[Any]:
            first = len(self.log.calls)
            with ExitStack() as waiting:
                with self._batch_under_way(), original(*args, **kwargs) as manager:
                    yield manager
                    # What is not asynchronous is waited for as the batch ends.
                    if self.log.calls[first:]:
                        waiting.enter_context(self._waiting_for(self.log.calls[first]))
            # The works exist only now, and each of them finishes all calls of the batch.
            batch = self.log.calls[first:]
            self._batches += 1
            ended = None if manager.works else self._event()
            for call in batch:
                call.asynchronous = bool(manager.works)
                call.waited = None if manager.works else self.now()
                call.wait_event, call.batch = ended, self._batches
            self._create(*batch)
            for work in manager.works:
                self._unfinished[work] = batch

        return coalesced

    def batching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def batch_isend_irecv(*args: Any, **kwargs: Any) -> Any:
            first = len(self.log.calls)
            with self._batch_under_way():
                works = original(*args, **kwargs)
            # Where the backend coalesces, the manager has numbered the batch.
            batch = [call for call in self.log.calls[first:] if call.batch is None]
            self._batches += bool(batch)
            for call in batch:
                call.batch = self._batches
            self._create(*batch)
            return works

        return batch_isend_irecv

    def waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            here, finished = self.now(), self._unfinished.pop(work, ())
            event = self._event() if finished else None
            for call in finished:
                call.waited, call.wait_event = here, event
            with self._waiting_for(finished[0]) if finished else nullcontext():
                return original(work, *args, **kwargs)

        return wait


def _tensor_facts(given: Mapping[str, Any]) -> Iterator[TensorFacts]:
    for argument, value in given.items():
        listed = value if isinstance(value, list) else [value]
        for tensor in listed:
            if isinstance(tensor, torch.Tensor):
                yield TensorFacts.of(argument, tensor)


def _reduction(given: Mapping[str, Any]) -> str:
    op = given.get("op", dist.ReduceOp.SUM)
    # A ReduceOp wraps a RedOpType; either prints as "<RedOpType.SUM: 0>" or "ReduceOp.SUM".
    return str(getattr(op, "op", op)).rpartition(".")[2].partition(":")[0].strip(">")


def _label(group: Any, ranks: Sequence[int]) -> str:
    return _described(str(getattr(group, "group_desc", "")) if group is not None else "default_pg", ranks)


def _described(description: str, ranks: Sequence[int]) -> str:
    if description in ("", "undefined"):
        return "ranks " + ",".join(str(rank) for rank in ranks)
    return description


def _dtype(tensors: Any) -> str:
    listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors or []
    return str(listed[0].dtype).removeprefix("torch.") if listed else ""


def _peer(given: Mapping[str, Any], ranks: Sequence[int]) -> int | None:
    """Return the global rank that a call names, as a global rank or by its place in the group."""
    for name in ("dst", "src"):
        if given.get(name) is not None:
            return int(given[name])
        place = given.get(f"group_{name}")
        if place is not None:
            return ranks[int(place)]
    return None


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

_SAME_OPERATION = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
"""Later names of counted functions, recorded under the name that every supported torch has."""

_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
"""Collectives of Python objects, whose bytes only the ranks know that pickle them."""

_SPLITS = ("input_split_sizes", "output_split_sizes")
_BETWEEN = (
    str(Path(torch.__file__).parent),
    str(Path(__file__)),
    contextlib.__file__,
    "<",
)
"""Code between a call and its check."""

COLLECTIVES = frozenset(_MEASURES) - MESSAGES - {"barrier"}
"""Operations in which a whole group takes part and data moves."""
